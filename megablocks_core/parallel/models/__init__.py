"""Whole models of others, cut over a tensor-parallel group."""
