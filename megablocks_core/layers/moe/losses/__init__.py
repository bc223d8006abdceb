"""Auxiliary losses of routings."""
