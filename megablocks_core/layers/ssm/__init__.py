"""State-space layers: their functions, and the mixers of hybrid models."""
