"""Fill a model's tensors from lazy ones: straight into their memory, or some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.export.finite import is_finite
from megablocks_core.export.lazies import Box, Lazy
from megablocks_core.files.slices import STEP_BYTES, FileTensor, boxes, is_plain
from megablocks_core.groups import ShardSpec, own_slices, whole_shape
from megablocks_core.groups.placements import local, placement_specs

# Of a tensor that is computed, or copied to another device, so much is in memory at a time.
_SLAB_BYTES = 2**24
_PIECE_BYTES = 2**26
_THREADS = 4


class Piece(NamedTuple):
    """A box of a tensor in a folder, and the memory that it goes to.

    Attributes:
        name: Of the tensor in the model.
        target: Memory of the box's shape.
        whole: The tensor in the folder.
        box: With a slice for each dimension.
    """

    name: str
    target: Tensor
    whole: Lazy
    box: Box


def pieces(
    tensor: Tensor, specs: Sequence[ShardSpec], wholes: Mapping[str, Lazy], *, stacked: bool
) -> Iterator[Piece]:
    """What a rank's share of a tensor is filled from.

    Args:
        tensor: The share.
        specs: Its cuts; a DTensor's placements cut inside them.
        wholes: By name the whole tensor, or with ``stacked`` all those that it stacks, in order.
        stacked: Whether the tensor stacks ``wholes`` along dim 0.
    """
    target, cuts, named = local(tensor.detach()), (*specs, *placement_specs(tensor)), [*wholes]
    for theirs, ours in own_slices(cuts, whole_shape(tuple(target.shape), cuts)):
        if not stacked:
            yield from _cut(named[0], target[ours], wholes[named[0]], theirs)
            continue
        which, *inside = theirs
        for name, part in zip(named[which], target[ours], strict=True):
            yield from _cut(name, part, wholes[name], tuple(inside))


def _cut(name: str, target: Tensor, whole: Lazy, box: Box) -> Iterator[Piece]:
    """Pieces of so many bytes that each of several threads has some."""
    for part in boxes(box, target.dtype.itemsize, _PIECE_BYTES):
        yield Piece(name, target[_inside(part, box)], whole, part)


def fill(found: Sequence[Piece]) -> list[str]:
    """Fill the targets, by several threads.

    Returns:
        Names of tensors that have values now that are not finite, in the order of ``found``.
    """
    stop = Event()
    # Files are read from front to back.
    order = sorted(range(len(found)), key=lambda index: _place(found[index].whole))
    waiting = iter(order)  # next() of a list's iterator is atomic
    strange: set[str] = set()

    def work() -> None:
        try:
            for index in waiting:
                if stop.is_set():
                    return
                if not _filled(found[index], stop):
                    strange.add(found[index].name)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(_THREADS)]:
                worker.result()
        finally:
            stop.set()
    return list(dict.fromkeys(piece.name for piece in found if piece.name in strange))


def _place(whole: Lazy) -> tuple[str, int]:
    return (str(whole.file.path), whole.offset) if isinstance(whole, FileTensor) else ("", 0)


@torch.no_grad()
def _filled(piece: Piece, stop: Event) -> bool:
    """Fill one target, and say whether all its values are finite."""
    _, target, whole, box = piece
    straight = whole if isinstance(whole, FileTensor) and is_plain(target) else None
    itemsize = (straight or target).dtype.itemsize
    finite = True
    for part in boxes(box, itemsize, _SLAB_BYTES if straight is None else STEP_BYTES):
        if stop.is_set():
            break
        values = into = target[_inside(part, box)]
        if straight is not None:
            straight.read_into(into, part)
        else:
            values = whole[part].to(target.dtype)
            into.copy_(values)
        finite = finite and is_finite(values)
    return finite


def _inside(part: Box, box: Box) -> Box:
    """The slices of ``box`` that hold ``part``, which lies in it."""
    return tuple(
        slice(inner.start - outer.start, inner.stop - outer.start)
        for inner, outer in zip(part, box, strict=True)
    )
