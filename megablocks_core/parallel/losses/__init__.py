"""Losses over a vocabulary that is cut, with logits and without."""
