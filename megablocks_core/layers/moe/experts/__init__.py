"""Experts: what is computed with each token, in several forms."""
