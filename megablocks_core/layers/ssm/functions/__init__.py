"""Functions of state-space layers: chunked ones, single steps, and their plain twins."""
