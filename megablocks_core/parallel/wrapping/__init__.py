"""What wrappers that reduce gradients ask of a module: nobody else does, and ranks agree."""
