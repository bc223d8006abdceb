"""What a recipe and a calibration mean for a TensorRT-LLM checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

import torch

from megablocks_core.export.described import Described
from megablocks_core.export.quantising.amaxes import amaxes
from megablocks_core.export.quantising.calibration import Calibration
from megablocks_core.export.quantising.recipe import Fp8, Int8, Recipe
from megablocks_core.export.quantising.tensors import converted
from megablocks_core.export.trtllm.model import Model
from megablocks_core.export.trtllm.scales import Piece, Scales
from megablocks_core.groups import Group, Whole, together

_KEY, _VALUE = ".k_proj.weight", ".v_proj.weight"


def check_recipe(recipe: object, calibration: object, model: Model) -> None:
    """Raise for what is not written.

    Raises:
        ValueError: The recipe is none that the format has, or lacks its calibration.
    """
    if recipe is not None and not isinstance(recipe, Fp8 | Int8):
        raise ValueError(
            f"recipe={recipe!r} must be None, Fp8() or Int8(); save_quantized_hf writes others"
        )
    if recipe is not None and model.family == "mamba2":
        raise ValueError(f"recipe={recipe} must be None for mamba2")
    if isinstance(recipe, Int8) and (recipe.exclude or recipe.include):
        raise ValueError(f"recipe={recipe} must take what it does by default: a runtime quantises")
    if isinstance(recipe, Fp8) and calibration is None:
        raise ValueError(f"calibration=None must be one for {recipe}, which calibrate() makes")


def scales_of(
    recipe: Recipe | None,
    found: Described,
    calibration: Calibration | None,
    *,
    group: Group,
    task: str,
) -> Scales:
    """The factors of all weights; every rank calls it. Looks at weights once, as ``amaxes`` does.

    Raises:
        ValueError: The recipe takes no weight, or the calibration lacks one, or has a magnitude
            that is not above 0 and finite.
    """
    if not isinstance(recipe, Fp8) or calibration is None:
        return Scales()
    with together(task, group=group):
        taken = [one.name for one in found.wholes if _takes(recipe, one.name, one.shape)]
        if not taken:
            raise ValueError(f"recipe={recipe} must take a weight of the model, but takes none")
        inputs = _known(calibration.inputs, "inputs", taken)
        keys: dict[str, float] = {}
        values: dict[str, float] = {}
        if recipe.kv_cache:
            names = [one.name for one in found.wholes]
            keys = _known(calibration.keys, "keys", _ending(names, _KEY))
            values = _known(calibration.values, "values", _ending(names, _VALUE))
            if not keys:
                raise ValueError("kv_cache=True must be False for a model without k_proj, v_proj")
    dtypes = {one.name: one.dtype for one in found.wholes}
    weights = {name: converted(found.made[name], dtypes[name]) for name in taken}
    largest = amaxes(weights, found.ours, found.collection, group=group)
    return Scales(frozenset(taken), largest, inputs, keys, values)


def assumed_scales(recipe: Recipe | None, wholes: Iterable[Whole]) -> Scales:
    """Factors of the right names and shapes, before any value was looked at."""
    if not isinstance(recipe, Fp8):
        return Scales()
    taken = {one.name for one in wholes if _takes(recipe, one.name, one.shape)}
    ones = dict.fromkeys(taken, 1.0)
    keys, values = cached_of(one.name for one in wholes) if recipe.kv_cache else ([], [])
    return Scales(taken, ones, ones, dict.fromkeys(keys, 1.0), dict.fromkeys(values, 1.0))


def cached_of(schema: Iterable[str]) -> tuple[list[str], list[str]]:
    """The weights that make cached keys, and values."""
    names = list(schema)
    return _ending(names, _KEY), _ending(names, _VALUE)


def entry_of(recipe: Recipe | None, ranks: Sequence[Sequence[Piece]]) -> dict[str, Any]:
    """The entry ``quantization`` of ``config.json``.

    Args:
        recipe: The format.
        ranks: The pieces of each rank.

    Raises:
        ValueError: Modules of one name are quantised on some ranks alone.
    """
    if recipe is None:
        return {"quant_algo": None, "kv_cache_quant_algo": None}
    found: dict[str, Any] = {
        "quant_algo": recipe.algorithm,
        "kv_cache_quant_algo": recipe.cache_algorithm,
    }
    if isinstance(recipe, Fp8):
        found["exclude_modules"] = _excluded(ranks)
    return found


def _excluded(ranks: Sequence[Sequence[Piece]]) -> list[str]:
    kinds: dict[str, set[bool]] = {}
    for pieces in ranks:
        for name, value, dtype in pieces:
            module, _, last = name.rpartition(".")
            if last == "weight" and len(value.get_shape()) > 1 and "embedding" not in module:
                kinds.setdefault(module, set()).add(dtype == torch.float8_e4m3fn)
    if both := [module for module, found in kinds.items() if len(found) > 1]:
        raise ValueError(f"recipe must take {both} of all stages, or of none: names are local")
    return sorted(module for module, found in kinds.items() if False in found)


def _takes(recipe: Fp8, name: str, shape: Sequence[int]) -> bool:
    return len(shape) == 2 and recipe.takes(name)


def _ending(names: Sequence[str], end: str) -> list[str]:
    return [name for name in names if name.endswith(end)]


def _known(given: Mapping[str, float], kind: str, names: Sequence[str]) -> dict[str, float]:
    found = {}
    for name in names:
        if name not in given:
            raise ValueError(f"calibration.{kind} must have {name}")
        if not 0 < given[name] < inf:
            value = given[name]
            raise ValueError(f"calibration.{kind}[{name!r}]={value} must be above 0 and finite")
        found[name] = given[name]
    return found
