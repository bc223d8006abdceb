"""The tensors that stand in a quantised folder for a weight: names, shapes, dtypes, and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megablocks_core.export.layout import Shapes
from megablocks_core.export.lazies import Lazy, Shape
from megablocks_core.export.quantising.recipe import (
    Fp8,
    Fp8Blocks,
    Int4,
    Int8,
    Nvfp4,
    Recipe,
    module_of,
    together_with,
)
from megablocks_core.export.quantising.tensors import (
    GROUP_OF_NVFP4,
    fp8_block_numbers,
    fp8_block_scales,
    fp8_numbers,
    fp8_scale,
    int4_numbers,
    int4_scales,
    int8_numbers,
    int8_scales,
    nvfp4_numbers,
    nvfp4_scale,
    nvfp4_scales,
    ones,
    scalar,
)

Kind = tuple[Shape, torch.dtype | None]
_CACHED = {"k_proj": "k_scale", "v_proj": "v_scale"}
_F8, _F32, _U8, _I8 = torch.float8_e4m3fn, torch.float32, torch.uint8, torch.int8


@dataclass(frozen=True)
class Amaxes:
    """The largest magnitudes that scales are made of, by the on-disk name of a weight.

    Attributes:
        weights: Of the weights.
        inputs: Of what they are multiplied with.
    """

    weights: Mapping[str, float]
    inputs: Mapping[str, float]


def schema_of(recipe: Recipe, name: str, shape: Shape) -> dict[str, Kind]:
    """Shape and dtype of each tensor that stands for a weight [O I]; no dtype: any of plain ones.

    Blocks stand for stacks of weights [... O I] too.

    Raises:
        ValueError: The weight is not of whole groups.
    """
    module = module_of(name)
    if isinstance(recipe, Fp8):
        scales: dict[str, Kind] = {f"{name}_scale": ((), _F32), f"{module}.input_scale": ((), _F32)}
        return {name: (shape, _F8), **scales}
    if isinstance(recipe, Fp8Blocks):
        outer, matrix = shape[:-2], shape[-2:]
        blocks = (-(-size // step) for size, step in zip(matrix, recipe.block, strict=True))
        return {name: (shape, _F8), f"{name}_scale_inv": ((*outer, *blocks), _F32)}
    rows, columns = shape
    if isinstance(recipe, Nvfp4):
        _check_groups(name, shape, GROUP_OF_NVFP4, "Nvfp4")
        return {
            name: ((rows, columns // 2), _U8),
            f"{name}_scale": ((rows, columns // GROUP_OF_NVFP4), _F8),
            f"{name}_scale_2": ((), _F32),
            f"{module}.input_scale": ((), _F32),
        }
    if isinstance(recipe, Int8):
        return {name: (shape, _I8), f"{name}_scale": ((rows,), _F32)}
    assert isinstance(recipe, Int4)
    _check_groups(name, shape, recipe.group_size, f"group_size={recipe.group_size}")
    if rows % 2:
        raise ValueError(f"{name} {list(shape)} must have an even number of rows, two a byte")
    return {
        name: ((rows // 2, columns), _U8),
        f"{name}_scale": ((rows, columns // recipe.group_size), _F32),
        f"{module}.pre_quant_scale": ((columns,), None),
    }


def quantised(
    recipe: Recipe, name: str, weight: Lazy, dtype: torch.dtype, amaxes: Amaxes
) -> dict[str, Lazy]:
    """The tensors that ``schema_of`` names, made of the weight, whose dtype is given."""
    module = module_of(name)
    if isinstance(recipe, Fp8):
        # Servers hold gate and up of an expert as one weight, with one scale.
        is_expert = ".experts." in name
        scale = fp8_scale(_shared(amaxes.weights, name) if is_expert else amaxes.weights[name])
        return {
            name: fp8_numbers(weight, scale),
            f"{name}_scale": scalar(scale),
            f"{module}.input_scale": scalar(fp8_scale(amaxes.inputs[name])),
        }
    if isinstance(recipe, Fp8Blocks):
        return {
            name: fp8_block_numbers(weight, recipe.block),
            f"{name}_scale_inv": fp8_block_scales(weight, recipe.block),
        }
    if isinstance(recipe, Nvfp4):
        scale = nvfp4_scale(_shared(amaxes.weights, name))
        return {
            name: nvfp4_numbers(weight, scale),
            f"{name}_scale": nvfp4_scales(weight, scale),
            f"{name}_scale_2": scalar(scale),
            f"{module}.input_scale": scalar(nvfp4_scale(_shared(amaxes.inputs, name))),
        }
    if isinstance(recipe, Int8):
        return {name: int8_numbers(weight), f"{name}_scale": int8_scales(weight)}
    assert isinstance(recipe, Int4)
    return {
        name: int4_numbers(weight, recipe.group_size),
        f"{name}_scale": int4_scales(weight, recipe.group_size),
        # TensorRT-LLM asks for what AWQ multiplies activations with, in weights that stand alone.
        f"{module}.pre_quant_scale": ones(weight.get_shape()[1], dtype),
    }


def weights_needing_amax(recipe: Recipe) -> bool:
    """Whether numbers of a weight need the largest magnitude of all of it."""
    return isinstance(recipe, Fp8 | Nvfp4)


def cache_scales(names: Iterable[str]) -> dict[str, str]:
    """Names of the scales of cached keys and values, and the on-disk names of what makes these."""
    found = {}
    for name in names:
        module, _, last = name.rpartition(".")
        scale = _CACHED.get(module.rpartition(".")[2])
        if last == "weight" and scale is not None:
            found[f"{module}.{scale}"] = name
    return found


def check_together(recipe: Recipe, taken: Shapes, shapes: Shapes) -> None:
    """Raise where weights that runtimes multiply at once are quantised in part.

    Raises:
        ValueError: By name, what stays as it is beside a weight that does not.
    """
    kept = [
        f"{other} beside {name}"
        for name in taken
        for other in together_with(name)
        if other in shapes and other not in taken
    ]
    if kept:
        raise ValueError(
            f"exclude={recipe.exclude} must leave all of q, k and v, or of gate and up, as they "
            f"are: {', '.join(kept)}"
        )


def _shared(amaxes: Mapping[str, float], name: str) -> float:
    """The largest of those of weights that are multiplied at once."""
    return max(amaxes[other] for other in together_with(name) if other in amaxes)


def _check_groups(name: str, shape: Shape, size: int, what: str) -> None:
    if shape[-1] % size:
        raise ValueError(
            f"{name} {list(shape)} must have rows of whole groups of {size} numbers for {what}; "
            "exclude= leaves it as it is"
        )
