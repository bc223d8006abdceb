"""Hugging Face folders in and out, from any layout to any."""

from megablocks_core.export.loading import load_hf as load_hf
from megablocks_core.export.saving import save_hf as save_hf
from megablocks_core.export.verifying import verify as verify
