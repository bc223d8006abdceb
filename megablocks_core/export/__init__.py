"""Hugging Face folders in and out, from any layout to any."""

from megablocks_core.export.checking import verify as verify
from megablocks_core.export.loading import load_hf as load_hf
from megablocks_core.export.quantising.saving import save_quantized_hf as save_quantized_hf
from megablocks_core.export.saving import save_hf as save_hf
