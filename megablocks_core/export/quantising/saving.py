"""Write the weights of a model, from any layout, as a Hugging Face folder of quantised weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import inf, prod
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from megablocks_core.export.arguments import check_bytes
from megablocks_core.export.described import Described, described, target_of
from megablocks_core.export.drafting import FolderDraft, Written
from megablocks_core.export.hf_files import as_json, beside, name_dtype, split
from megablocks_core.export.layout import Shapes
from megablocks_core.export.lazies import Lazy, shape_of
from megablocks_core.export.quantising.amaxes import amaxes
from megablocks_core.export.quantising.calibration import Calibration
from megablocks_core.export.quantising.config import (
    ENTRY,
    FILE,
    Settings,
    excluded_modules,
    quantization_config,
    quantization_file,
)
from megablocks_core.export.quantising.recipe import Recipe
from megablocks_core.export.quantising.tensors import converted, fp8_scale, scalar
from megablocks_core.export.quantising.weights import (
    Amaxes,
    cache_scales,
    check_together,
    quantised,
    schema_of,
    weights_needing_amax,
)
from megablocks_core.export.slabs import dtype_of, nbytes_of
from megablocks_core.export.writing import write_folder
from megablocks_core.groups import LOCAL, Group, Whole, interrupts_held, together


def save_quantized_hf(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    recipe: Recipe,
    group: Group = LOCAL,
    calibration: Calibration | None = None,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | Literal["like"] | None = None,
    max_file_bytes: int = 5 * 2**30,
    vocab_size: int | None = None,
) -> None:
    """Write ``model``, from any layout, as a folder of quantised weights for inference servers.

    The folder is that of ``save_hf`` with the same arguments, but for the weights that ``recipe``
    takes: numbers and scales stand for each, in the names and layouts of ModelOpt, or for blocks
    of DeepSeek-V3. ``quantization_config`` in ``config.json`` says so, and for ModelOpt's formats
    ``hf_quant_config.json`` too. It appears whole or not at all, and its bytes depend on no
    layout. Every value is sent as in ``save_hf``, but up to three times: for the largest magnitude
    of a weight, for scales of groups, and for numbers.

    Args:
        model: As ``save_hf`` has it.
        path: The folder: new, or empty.
        recipe: The format, and which weights stay as they are.
        group: All ranks that hold a part of the model.
        calibration: What data has shown of activations (``calibrate``); for ``Fp8`` and ``Nvfp4``.
        like: As ``save_hf`` has it.
        dtype: Of all floating-point tensors, before some are quantised.
        max_file_bytes: As ``save_hf`` has it.
        vocab_size: As ``save_hf`` has it.

    Raises:
        ValueError: What ``save_hf`` says; or the recipe takes no weight, a weight is not of whole
            groups, or weights that are multiplied at once are taken in part; or the calibration
            lacks one, or has a magnitude that is not above 0 and finite. Nothing was written.
        RuntimeError: Another rank failed.
        OSError: The disk is full, or another fault of the file system.
    """
    task = f"save_quantized_hf({str(path)!r})"
    with interrupts_held(group=group):
        target = target_of(model, path, group=group, task=task)
        with together(task, group=group):
            check_asked(recipe, calibration, max_file_bytes)
        found = described(
            model,
            group=group,
            task=task,
            agreed={
                "path": str(target),
                "max_file_bytes": max_file_bytes,
                "recipe": recipe,
                "calibration": None if calibration is None else _told(calibration),
            },
            dtype=dtype,
            like=like,
            vocab_size=vocab_size,
        )
        write_quantised(
            found,
            target,
            recipe=recipe,
            calibration=calibration,
            like=like,
            max_file_bytes=max_file_bytes,
            group=group,
            task=task,
        )


def write_quantised(
    found: Described,
    target: Path,
    *,
    recipe: Recipe,
    calibration: Calibration | None,
    like: str | os.PathLike[str] | None,
    max_file_bytes: int,
    group: Group = LOCAL,
    task: str,
) -> None:
    """Write the folder of a model that has been described; every rank calls it.

    Raises:
        ValueError: What ``save_quantized_hf`` says of recipe and calibration.
    """
    with together(task, group=group):
        settings = _settings(recipe, found)
        largest = _checked(recipe, found, calibration)
    written = _written(settings, found, largest, group)
    config = {**found.config, ENTRY: quantization_config(settings)}
    name_dtype(config, found.wholes)
    files = split(written, max_file_bytes)
    also = quantization_file(settings)
    draft = FolderDraft(target, files, found.ours, rank=group.rank, num_ranks=group.size)
    write_folder(
        draft,
        found.collection,
        lambda: {
            **beside(files, config, None if like is None else Path(like)),
            **({FILE: as_json(also)} if also is not None else {}),
        },
        group=group,
        task=task,
    )


def check_asked(recipe: object, calibration: object, max_file_bytes: object) -> None:
    """Raise for what is none of these.

    Raises:
        ValueError: By name.
    """
    check_bytes(max_file_bytes, "max_file_bytes")
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe={recipe!r} must be one, such as Fp8()")
    if not (calibration is None or isinstance(calibration, Calibration)):
        raise ValueError(f"calibration={calibration!r} must be a Calibration")


def _told(given: Calibration) -> list[list[tuple[str, float]]]:
    return [sorted(one.items()) for one in (given.inputs, given.keys, given.values)]


def _settings(recipe: Recipe, found: Described) -> Settings:
    """What is quantised, and what is not, by on-disk names.

    Raises:
        ValueError: Nothing is, or something of it cannot be.
    """
    shapes = {whole.name: whole.shape for whole in found.wholes}
    taken = _taken(recipe, shapes)
    if not taken:
        raise ValueError(f"recipe={recipe} must take a weight of the model, but takes none")
    check_together(recipe, taken, shapes)
    for name, shape in taken.items():
        schema_of(recipe, name, shape)
    kept = [
        name
        for name, shape in shapes.items()
        if name not in taken
        and (len(shape) > 1 and name.endswith(".weight") or ".experts." in name)
    ]
    return Settings(recipe, excluded_modules([*kept, *found.layout.ties]))


def _taken(recipe: Recipe, shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if len(shape) == 2 and recipe.takes(name)}


def _checked(
    recipe: Recipe, found: Described, calibration: Calibration | None
) -> dict[str, Mapping[str, float]]:
    """The magnitudes that data must have given: of inputs, and by names of scales of the cache.

    Raises:
        ValueError: One is missing, or has no scale.
    """
    if not recipe.is_calibrated:
        return {"inputs": {}, "cache": {}}
    if calibration is None:
        raise ValueError(f"calibration=None must be one for {recipe}, which calibrate() makes")
    names = [whole.name for whole in found.wholes]
    taken = _taken(recipe, {whole.name: whole.shape for whole in found.wholes})
    inputs = {name: _amax(calibration.inputs, name, "inputs") for name in taken}
    cache: dict[str, float] = {}
    if recipe.cache_algorithm is not None:
        scales = cache_scales(names)
        if not scales:
            raise ValueError("kv_cache=True must be False for a model without k_proj and v_proj")
        for scale, name in scales.items():
            kind = "keys" if scale.endswith("k_scale") else "values"
            cache[scale] = _amax(getattr(calibration, kind), name, kind)
    return {"inputs": inputs, "cache": cache}


def _amax(given: Mapping[str, float], name: str, kind: str) -> float:
    value = given.get(name)
    if value is None:
        raise ValueError(f"calibration.{kind} must have {name}")
    if not 0 < value < inf:
        raise ValueError(f"calibration.{kind}[{name!r}]={value} must be above 0 and finite")
    return value


def _written(
    settings: Settings,
    found: Described,
    given: Mapping[str, Mapping[str, float]],
    group: Group,
) -> list[Written]:
    """The tensors of the files, layer by layer; every rank calls it."""
    recipe = settings.recipe
    plain = {whole.name: converted(found.made[whole.name], whole.dtype) for whole in found.wholes}
    taken = _taken(recipe, {whole.name: whole.shape for whole in found.wholes})
    largest: dict[str, float] = {}
    if weights_needing_amax(recipe):
        looked_at = {name: plain[name] for name in taken}
        largest = amaxes(looked_at, found.ours, found.collection, group=group)
    if wide := [name for name, value in largest.items() if value == inf]:
        raise ValueError(f"{', '.join(wide)} must have values that float32 holds")
    both = Amaxes(largest, given["inputs"])
    written: list[Written] = []
    for whole in found.wholes:
        weight = plain[whole.name]
        if whole.name in taken:
            parts = quantised(recipe, whole.name, weight, whole.dtype, both)
            written += [_one(name, part, nbytes_of(weight)) for name, part in parts.items()]
        else:
            written.append(Written(whole, found.made[whole.name]))
    written += [_one(name, scalar(fp8_scale(amax)), 4) for name, amax in given["cache"].items()]
    return written


def nbytes_of_folder(recipe: Recipe, wholes: Sequence[Whole]) -> int:
    """The bytes of all tensors that are written for those of a plain folder.

    Raises:
        ValueError: A weight is not of whole groups.
    """
    taken = _taken(recipe, {whole.name: whole.shape for whole in wholes})
    total = 4 * len(cache_scales(one.name for one in wholes)) if recipe.cache_algorithm else 0
    for whole in wholes:
        if whole.name not in taken:
            total += whole.nbytes
            continue
        for shape, dtype in schema_of(recipe, whole.name, whole.shape).values():
            total += prod(shape) * (dtype or whole.dtype).itemsize
    return total


def _one(name: str, part: Lazy, nbytes: int) -> Written:
    """A tensor that is made of so many bytes of a weight."""
    whole = Whole(name, shape_of(part), dtype_of(part))
    return Written(whole, part, max(1, nbytes // max(1, whole.nbytes)))
