"""Check a folder against the tensors that its config describes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from megablocks_core.export.arguments import folder_of
from megablocks_core.export.families import FAMILIES, family_of
from megablocks_core.export.layout import Layout, Shapes
from megablocks_core.export.slabs import are_equal, dtype_of, nbytes_of, slabs
from megablocks_core.export.source import FLOATS, HfFolder


def verify(
    path: str | os.PathLike[str],
    *,
    values: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Check that a folder's files are whole and hold what its ``config.json`` describes.

    Args:
        path: The folder.
        values: Look at values too, which must be finite, and equal where tensors are tied; else
            headers alone are read.
        progress: Called with the bytes of values looked at so far, and in all.

    Raises:
        ValueError: What is wrong, by name.
    """
    source = HfFolder(folder_of(path))
    layout = layout_of(source.config)
    shapes = {name: source.shape(name) for name in source.tensors if not layout.ignores(name)}
    schema = layout.schema
    for name, twin in layout.ties.items():
        if name not in schema and shapes.get(name) == schema[twin]:
            del shapes[name]  # written although tied, as old checkpoints do
    check_schema(shapes, schema)
    strange = [name for name in shapes if source.tensors[name].get_dtype() not in FLOATS]
    if strange:
        raise ValueError(f"{path}: {strange} must have one of the dtypes {', '.join(FLOATS)}")
    if not values:
        return
    if faults := _not_finite(source, progress):
        raise ValueError(f"{path}: values must be finite: {'; '.join(faults)}")
    check_ties(source)


def check_ties(source: HfFolder) -> None:
    """Compare the values of tied tensors that a folder holds twice.

    Raises:
        ValueError: They differ.
    """
    for name, twin in source.layout.ties.items():
        if name in source.tensors and not are_equal(source.tensors[name], source.tensors[twin]):
            raise ValueError(f"{source.path}: {name} and {twin} are tied, but differ")


def _not_finite(source: HfFolder, progress: Callable[[int, int], None] | None) -> list[str]:
    """Which tensors hold NaN or infinities, and how many; a slab at a time."""
    total = sum(map(nbytes_of, source.tensors.values()))
    faults, done = [], 0
    for name, tensor in source.tensors.items():
        count = 0
        for box in slabs(source.shape(name), dtype_of(tensor)):
            found = tensor[box]
            count += found.numel() - int(found.isfinite().sum())
            done += found.nbytes
            if progress is not None:
                progress(done, total)
        if count:
            faults.append(f"{name} has {count} of {math.prod(source.shape(name))} that are not")
    return faults


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout of a config's files.

    Raises:
        ValueError: The family is unknown, or a size is missing.
    """
    family = family_of(config)
    if family is None:
        name = config.get("model_type")
        raise ValueError(f"model_type={name!r} must be one of {', '.join(FAMILIES)}")
    return family.layout(config)


def check_schema(shapes: Shapes, schema: Shapes) -> None:
    """Compare what there is with what the config describes.

    Raises:
        ValueError: Names are missing or left over, or shapes differ.
    """
    faults = []
    if missing := [name for name in schema if name not in shapes]:
        faults.append(f"missing {missing}")
    if unknown := [name for name in shapes if name not in schema]:
        faults.append(f"not described {unknown}")
    faults += [
        f"{name} has shape {shape}, described as {schema[name]}"
        for name, shape in shapes.items()
        if schema.get(name, shape) != shape
    ]
    if faults:
        raise ValueError("tensors must be those that config.json describes: " + "; ".join(faults))
