"""Layers whose weights are cut over a tensor-parallel group, and plans that say how."""
