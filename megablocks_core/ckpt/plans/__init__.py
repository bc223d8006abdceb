"""Who writes, reads and sends what: arithmetic without tensors, files or messages."""
