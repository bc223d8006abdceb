"""Kernels for layers: each has a plain twin that says the same."""
