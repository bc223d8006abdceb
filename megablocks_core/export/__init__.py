"""Hugging Face folders in and out, and TensorRT-LLM's checkpoints out, from any layout to any."""

from megablocks_core.export.checking import verify as verify
from megablocks_core.export.loading import load_hf as load_hf
from megablocks_core.export.quantising.calibrating import calibrate as calibrate
from megablocks_core.export.quantising.calibration import Calibration as Calibration
from megablocks_core.export.quantising.saving import save_quantized_hf as save_quantized_hf
from megablocks_core.export.saving import save_hf as save_hf
from megablocks_core.export.trtllm.engine import (
    build_and_save_engine as build_and_save_engine,
)
from megablocks_core.export.trtllm.saving import save_trtllm as save_trtllm
