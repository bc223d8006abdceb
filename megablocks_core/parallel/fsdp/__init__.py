"""Weights that are cut over the ranks that share them."""
