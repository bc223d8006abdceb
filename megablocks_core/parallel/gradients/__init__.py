"""Gradients of the whole model: summed, clipped, counted, scaled."""
