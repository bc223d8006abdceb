"""How two Hugging Face folders differ: tensors, config, and the files beside. A slab at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from filecmp import cmp
from pathlib import Path

from megablocks_core.export.arguments import folder_of
from megablocks_core.export.lazies import Lazy, shape_of
from megablocks_core.export.pickles import PICKLE
from megablocks_core.export.slabs import dtype_of, nbytes_of, slabs
from megablocks_core.export.source import INDEX, HfFolder
from megablocks_core.files.comparing import Compared, json_differences, side, tensor_differences
from megablocks_core.files.progress import Progress


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> Iterator[str]:
    """A line for each difference of two folders; none if they hold the same.

    Entries of the configs, by the path to what differs; names, shapes, dtypes and values of
    tensors, wherever they lie in files; other files beside them. Values of one dtype are compared
    bit by bit; quantised ones as the plain numbers that they stand for. A line on the terminal
    shows how far it is.

    Raises:
        ValueError: A folder is not whole.
    """
    first, second = (HfFolder(folder_of(path)) for path in (one, other))
    common = first.tensors.keys() & second.tensors.keys()
    progress = Progress("diff", sum(nbytes_of(first.tensors[name]) for name in common))
    try:
        for line in _lines(first, second, progress):
            progress.close()
            yield line
    finally:
        progress.close()


def _lines(one: HfFolder, other: HfFolder, progress: Progress) -> Iterator[str]:
    yield from json_differences(one.config, other.config, "config")
    for name in [*one.tensors, *(name for name in other.tensors if name not in one.tensors)]:
        yield from tensor_differences(
            name,
            _compared(one.tensors.get(name)),
            _compared(other.tensors.get(name)),
            boxes=lambda tensor: slabs(tensor.shape, tensor.dtype),
            progress=progress,
        )
    files, others = _beside(one.path), _beside(other.path)
    for name in sorted(files.keys() | others.keys()):
        if name not in files or name not in others:
            yield f"only in {side(name in files)}: file {name}"
        elif not cmp(files[name], others[name], shallow=False):
            yield f"file {name}: differs"


def _compared(tensor: Lazy | None) -> Compared | None:
    if tensor is None:
        return None
    return Compared(dtype_of(tensor), shape_of(tensor), tensor.__getitem__)


def _beside(folder: Path) -> dict[str, Path]:
    """Files that hold neither tensors nor the config."""
    known = (INDEX, PICKLE, "config.json")
    return {
        path.name: path
        for path in folder.iterdir()
        if path.is_file() and path.suffix != ".safetensors" and path.name not in known
    }
