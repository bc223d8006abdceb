"""Check a folder of quantised weights against what its config describes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch

from megablocks_core.export.arguments import folder_of
from megablocks_core.export.lazies import Lazy, shape_of
from megablocks_core.export.quantised import with_file
from megablocks_core.export.quantising.config import Settings, settings_of
from megablocks_core.export.quantising.recipe import Fp8Blocks
from megablocks_core.export.quantising.weights import Kind, cache_scales, schema_of
from megablocks_core.export.slabs import dtype_of, nbytes_of, slabs
from megablocks_core.export.source import FLOATS, HfFolder
from megablocks_core.export.verifying import check_ties, layout_of
from megablocks_core.files import read_json
from megablocks_core.files.safetensors import DTYPE_CODES

_SCALES = ("_scale", "_scale_2", "_scale_inv")
# Scales of blocks that other folders have in narrower floats.
_NARROW = ("F32", "BF16", "F16")


def is_quantised(folder: Path) -> bool:
    """Whether a folder says that its weights are quantised by a recipe.

    Raises:
        ValueError: Its config is missing, or names an algorithm that is not served.
    """
    config = with_file(read_json(folder / "config.json", dict), folder)
    return settings_of(config, folder) is not None


def verify_quantised(
    path: str | os.PathLike[str],
    *,
    values: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Check that a folder's files are whole and hold what its config describes, number and scale.

    Args:
        path: A folder whose config names a recipe, as ``save_quantized_hf`` writes it.
        values: Look at values too: all must be finite, scales above 0, and tied tensors equal;
            else headers alone.
        progress: Called with the bytes of values looked at so far, and in all.

    Raises:
        ValueError: What is wrong, by name.
    """
    source = HfFolder(folder_of(path))
    settings = settings_of(source.config, source.path)
    if settings is None:
        raise ValueError(f"{path} must be quantised by a recipe, and say so in its config")
    layout_of(source.config)  # raises for a family that is not known
    stored = {name: one for name, one in source.stored.items() if not _is_ignored(name, source)}
    schema, faults = _schema(source, settings, stored)
    faults += _faults(stored, schema)
    if faults:
        raise ValueError(
            f"{path}: tensors must be those that config.json describes: {'; '.join(faults)}"
        )
    if not values:
        return
    if faults := _wrong_values(stored, progress):
        raise ValueError(f"{path}: values must be finite, and scales above 0: {'; '.join(faults)}")
    check_ties(source)


def _is_ignored(name: str, source: HfFolder) -> bool:
    """Whether a tensor is one that nobody reads, or a scale of such a weight."""
    module = name.rpartition(".")[0]
    return source.layout.ignores(name) or source.layout.ignores(f"{module}.weight")


def _schema(
    source: HfFolder, settings: Settings, stored: Mapping[str, Lazy]
) -> tuple[dict[str, Kind], list[str]]:
    """What the files must hold, and what is said of them and cannot be."""
    recipe, layout = settings.recipe, source.layout
    has_blocks = isinstance(recipe, Fp8Blocks)
    shapes = layout.schema
    for name, twin in layout.ties.items():
        if name in stored and name not in shapes:
            shapes[name] = shapes[twin]  # written although tied, as old checkpoints do
    schema: dict[str, Kind] = {}
    faults = []
    for name, shape in shapes.items():
        is_plain = name not in stored or stored[name].get_dtype() in FLOATS
        if not is_plain and settings.excludes(name):
            faults.append(f"{name} is {stored[name].get_dtype()}, but excluded")
        if has_blocks:
            # Published folders do not say all that is plain, and hold stacks of experts too.
            is_made = not is_plain and len(shape) >= 2
        else:
            is_made = settings.takes(name, shape) or (not is_plain and len(shape) == 2)
        if is_made:
            schema |= schema_of(recipe, name, shape)
        else:
            schema[name] = (shape, None)
    if recipe.cache_algorithm is not None:
        schema |= dict.fromkeys(cache_scales(shapes), ((), torch.float32))
    return schema, faults


def _faults(stored: Mapping[str, Lazy], schema: Mapping[str, Kind]) -> list[str]:
    optional = (".pre_quant_scale",)
    missing = [name for name in schema if name not in stored and not name.endswith(optional)]
    faults = [f"missing {missing}"] if missing else []
    if unknown := [name for name in stored if name not in schema]:
        faults.append(f"not described {unknown}")
    for name, whole in stored.items():
        if name not in schema:
            continue
        want, dtype = schema[name]
        shape, code = shape_of(whole), whole.get_dtype()
        if shape != want:
            faults.append(f"{name} has shape {shape}, described as {want}")
        codes = FLOATS if dtype is None else (DTYPE_CODES[dtype],)
        codes = _NARROW if name.endswith("_scale_inv") else codes
        if code not in codes:
            faults.append(f"{name} is {code} and must be {' or '.join(codes)}")
    return faults


def _wrong_values(
    stored: Mapping[str, Lazy], progress: Callable[[int, int], None] | None
) -> list[str]:
    """Which tensors hold NaN or infinities, and which scales are not above 0, and how many."""
    total = sum(map(nbytes_of, stored.values()))
    faults, done = [], 0
    for name, whole in stored.items():
        shape, dtype = shape_of(whole), dtype_of(whole)
        is_scale, count = name.endswith(_SCALES), 0
        for box in slabs(shape, dtype, reads=4 // min(4, dtype.itemsize)):
            found = whole[box]
            done += found.nbytes
            if dtype.is_floating_point:
                found = found.float() if dtype.itemsize == 1 else found
                good = found.isfinite() & (found > 0) if is_scale else found.isfinite()
                count += good.numel() - int(good.sum())
            if progress is not None:
                progress(done, total)
        if count:
            faults.append(f"{name} has {count} of {prod(shape)} that are not")
    return faults
