"""Hugging Face folders in and out, from any layout to any."""

from megablocks_core.export.hf import load_hf as load_hf
from megablocks_core.export.hf import save_hf as save_hf
from megablocks_core.export.hf import verify as verify
