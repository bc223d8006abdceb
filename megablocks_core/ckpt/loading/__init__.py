"""Fill state from a checkpoint, and find the newest whole one."""
