"""What callers hand over, as this rank's shares of logical tensors."""
