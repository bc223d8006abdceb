"""Checkpoints of TensorRT-LLM up to 1.2, whose engines are built from them."""
