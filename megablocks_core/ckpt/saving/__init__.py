"""Write a checkpoint whole or not at all, beside training or not, and prune old ones."""
