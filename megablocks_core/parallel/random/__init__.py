"""Dropout as a function of counters."""
