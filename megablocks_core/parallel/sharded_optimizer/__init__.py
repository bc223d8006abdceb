"""An optimizer whose state is cut over the ranks that share the weights."""
