"""Bytes between files, ranks and tensors."""
