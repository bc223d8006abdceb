"""The files of a checkpoint: their names and keys, written and read with a hash a block."""
