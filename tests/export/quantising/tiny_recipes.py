"""A tiny model whose weights are of whole groups, a calibration of it, and every recipe."""

import torch
from safetensors.torch import load_file

from megablocks_core.export.quantising import Fp8, Fp8Blocks, Int4, Int8, Nvfp4
from megablocks_core.export.quantising.calibration import Calibration
from tests.export.tiny_models import tiny_model

SIZES = {"hidden_size": 32, "intermediate_size": 48}
RECIPES = {
    "fp8": Fp8(),
    "fp8-blocks": Fp8Blocks(block=(20, 12)),
    "nvfp4": Nvfp4(),
    "int8": Int8(),
    "int4": Int4(group_size=16),
}


def tiny(family="llama", dtype=torch.bfloat16, **options):
    return tiny_model(family, dtype, **{**SIZES, **options})


def calibrated(names):
    """Another magnitude for each weight."""
    inputs = {name: 1.5 + 0.25 * place for place, name in enumerate(sorted(names))}
    keys = {name: 3 + value for name, value in inputs.items() if ".k_proj." in name}
    values = {name: 5 + value for name, value in inputs.items() if ".v_proj." in name}
    return Calibration(inputs, keys, values)


def tensors_of(folder):
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
