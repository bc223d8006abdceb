"""Gradients that are reduced while backward runs."""
