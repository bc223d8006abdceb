"""How two checkpoints differ: names, shapes, dtypes, values, JSON. A slab at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megablocks_core.ckpt.tools.checkpoint import Checkpoint, Held
from megablocks_core.files.comparing import Compared, json_differences, side, tensor_differences
from megablocks_core.files.progress import Progress


def diff(one: Checkpoint, other: Checkpoint, *, progress: Progress) -> Iterator[str]:
    """A line for each difference; none if both hold the same.

    Names, shapes, dtypes and values of tensors; entries and JSON values, by the path to what
    differs in them (so run records too); files beside the tensors.

    Raises:
        CheckpointError: What is stored is damaged.
    """
    yield from json_differences(one.state, other.state)
    for name in [*one.tensors, *(name for name in other.tensors if name not in one.tensors)]:
        yield from tensor_differences(
            name,
            _compared(name, one),
            _compared(name, other),
            boxes=lambda tensor: Held(tensor.dtype, tensor.shape).slabs(),
            progress=progress,
        )
    files, others = one.beside(), other.beside()
    for file in sorted(files.keys() | others.keys()):
        if file not in files or file not in others:
            yield f"only in {side(file in files)}: file {file}"
        elif files[file] != others[file]:
            yield f"file {file}: differs"


def _compared(name: str, checkpoint: Checkpoint) -> Compared | None:
    held = checkpoint.tensors.get(name)
    return held and Compared(held.dtype, held.shape, partial(checkpoint.read, name))
