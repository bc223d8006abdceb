"""Whole logical tensors on the first rank of a group, a bounded bucket at a time, by marks.

What a writer of files needs: no rank but the first ever holds more than its own share and
the pieces of one bucket, and the first holds one bucket of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megablocks_core.groups.cuts import Box, ShardSpec, own_slices, whole_shape
from megablocks_core.groups.group import Group
from megablocks_core.groups.outcome import together
from megablocks_core.groups.placements import local, placement_specs

BUCKET_BYTES = 64 * 2**20


class Held(NamedTuple):
    """This rank's share of one logical tensor, and how it is cut."""

    name: str
    tensor: Tensor
    specs: tuple[ShardSpec, ...] = ()


class Whole(NamedTuple):
    """What one logical tensor is as a whole."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Cell(NamedTuple):
    """A box of a whole tensor and the first rank (within the group) that holds it."""

    rank: int
    box: Box


class _Share(NamedTuple):
    """What a rank tells the others about one tensor it holds."""

    whole: Whole
    boxes: list[tuple[Box, Box]]
    device: str


@dataclass
class _Source:
    """Where the cells of one whole tensor come from."""

    whole: Whole
    cells: list[Cell]
    devices: dict[int, str]

    @property
    def on_first_rank(self) -> bool:
        """Whether the first rank holds the whole tensor, in one piece."""
        return [cell.rank for cell in self.cells] == [0]


class Collection:
    """Plan, agreed between all ranks, to bring whole tensors to the first rank of ``group``.

    Args:
        held: This rank's shares; the placements of a DTensor cut inside its specs. A tensor need
            not be held on every rank, but the shares of all ranks together must make it whole.
        group: All ranks that hold shares.
        task: What to call the work in an error, such as "save('runs/step-10')".
        raises: What ranks raise when another one fails.
        order: Names as they shall come, where ranks hold different tensors; default those of the
            first rank, then what others hold besides.

    Attributes:
        wholes: The tensors, in the order in which ``visit`` brings them: widest dtype first,
            so that a file of them in this order is aligned, and then by ``order``.

    Raises:
        ValueError: On every rank: a share is on meta, its cuts name ranks outside ``group``,
            ranks disagree on a shape or dtype, or elements are held by no rank.
    """

    def __init__(
        self,
        held: Sequence[Held],
        *,
        group: Group,
        task: str,
        raises: type[Exception],
        order: Sequence[str] = (),
    ) -> None:
        self._group, self._task, self._raises = group, task, raises
        with self._together():
            held = [_without_placements(part) for part in held]
            shares = [_share(part, group) for part in held]
            self._held = {part.name: part.tensor for part in held}
            self._boxes = {share.whole.name: share.boxes for share in shares}
        sources = _sources(group.all_gather_object(shares))
        places = {name: place for place, name in enumerate(order)}
        self._plan = sorted(
            sources,
            key=lambda source: (
                -source.whole.dtype.itemsize,
                places.get(source.whole.name, len(places)),
            ),
        )
        self.wholes = [source.whole for source in self._plan]

    def visit(self, consume: Callable[[str, Tensor], None]) -> None:
        """Call ``consume(name, whole)`` on the first rank for each tensor, in order.

        ``whole`` lies on the CPU and must not be changed or kept. Every rank must call this.
        An exception on one rank, in ``consume`` too, raises on all. Sends each element once,
        and two small messages a bucket.
        """
        for bucket in self._buckets():
            with self._together():
                outgoing = [self._outgoing(source) for source in bucket]
            arrived = [
                self._exchange(source, pieces)
                for source, pieces in zip(bucket, outgoing, strict=True)
            ]
            with self._together():
                if self._group.rank == 0:
                    for source, whole in zip(bucket, arrived, strict=True):
                        consume(source.whole.name, whole)

    def _together(self) -> AbstractContextManager[None]:
        return together(self._task, group=self._group, raises=self._raises)

    def _buckets(self) -> Iterator[list[_Source]]:
        bucket, size = [], 0
        for source in self._plan:
            if bucket and size + source.whole.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(source)
            size += source.whole.nbytes
        if bucket:
            yield bucket

    def _outgoing(self, source: _Source) -> list[Tensor]:
        """On the first rank the memory for the whole, on the others the pieces to send."""
        rank, name = self._group.rank, source.whole.name
        if rank == 0:
            if source.on_first_rank:
                return [self._held[name].cpu()]
            return [torch.empty(source.whole.shape, dtype=source.whole.dtype)]
        return [
            as_bytes(self._held[name][_within(self._boxes[name], cell.box)])
            for cell in source.cells
            if cell.rank == rank
        ]

    def _exchange(self, source: _Source, pieces: list[Tensor]) -> Tensor:
        ranks, pg = self._group.ranks, self._group.pg
        if self._group.rank != 0:
            for piece in pieces:
                dist.send(piece, ranks[0], group=pg)
            return torch.empty(0)
        (whole,) = pieces
        if source.on_first_rank:
            return whole
        name = source.whole.name
        for cell in source.cells:
            if cell.rank == 0:
                whole[cell.box] = self._held[name][_within(self._boxes[name], cell.box)].cpu()
                continue
            shape = [part.stop - part.start for part in cell.box]
            piece = torch.empty(shape, dtype=whole.dtype, device=source.devices[cell.rank])
            dist.recv(as_bytes(piece), ranks[cell.rank], group=pg)
            whole[cell.box] = piece.cpu()
        return whole


def first_holders(boxes: Sequence[Sequence[Box]]) -> list[Cell]:
    """Cut what the ranks hold where any box begins or ends; each cell comes once.

    Args:
        boxes: For each rank, the boxes it holds of one whole tensor. Boxes of different
            ranks may overlap (replicas, slices that neighbours share).
    """
    num_dims = max((len(box) for held in boxes for box in held), default=0)
    ends = [
        sorted({end for held in boxes for box in held for end in (box[dim].start, box[dim].stop)})
        for dim in range(num_dims)
    ]
    holders: dict[tuple[tuple[int, int], ...], int] = {}
    for rank, held in enumerate(boxes):
        for box in held:
            spans = [
                [span for span in pairwise(ends[dim]) if part.start <= span[0] < part.stop]
                for dim, part in enumerate(box)
            ]
            for cell in product(*spans):
                holders.setdefault(cell, rank)
    return [Cell(rank, tuple(slice(*span) for span in cell)) for cell, rank in holders.items()]


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor as raw bytes, which every back end can send; shares memory if contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _without_placements(part: Held) -> Held:
    """A DTensor's local part, cut by its placements inside the marks."""
    name, tensor, specs = part
    return Held(name, local(tensor.detach()), (*specs, *placement_specs(tensor)))


def _share(part: Held, group: Group) -> _Share:
    name, tensor, specs = part
    if tensor.is_meta:
        raise ValueError(f"{name} is on meta; it must be a tensor that holds its values")
    for spec in specs:
        if spec.group.size > 1 and not set(spec.group.ranks) <= set(group.ranks):
            raise ValueError(
                f"group={group} must include the ranks {list(spec.group.ranks)} that hold {name}"
            )
    shape = whole_shape(tuple(tensor.shape), specs)
    whole = Whole(name, shape, tensor.dtype)
    return _Share(whole, own_slices(specs, shape), tensor.device.type)


def _sources(shares_of_ranks: list[list[_Share]]) -> list[_Source]:
    by_name: dict[str, list[tuple[int, _Share]]] = {}
    for rank, shares in enumerate(shares_of_ranks):
        for share in shares:
            by_name.setdefault(share.whole.name, []).append((rank, share))
    return [_source(holders, len(shares_of_ranks)) for holders in by_name.values()]


def _source(holders: list[tuple[int, _Share]], num_ranks: int) -> _Source:
    whole = holders[0][1].whole
    boxes: list[list[Box]] = [[] for _ in range(num_ranks)]
    for rank, share in holders:
        if share.whole != whole:
            raise ValueError(f"ranks disagree on {whole.name}: {whole[1:]} and {share.whole[1:]}")
        boxes[rank] = [theirs for theirs, _ in share.boxes]
    cells = first_holders(boxes)
    found = sum(prod(part.stop - part.start for part in cell.box) for cell in cells)
    if found != prod(whole.shape):
        raise ValueError(
            f"{whole.name}: the group holds {found} of the {prod(whole.shape)} elements of "
            f"shape {whole.shape}"
        )
    return _Source(whole, cells, {rank: share.device for rank, share in holders})


def _within(boxes: list[tuple[Box, Box]], cell: Box) -> Any:
    """The local slices of ``cell``, which lies in one of this rank's boxes."""
    for theirs, ours in boxes:
        pairs = list(zip(theirs, cell, strict=True))
        if all(outer.start <= inner.start < outer.stop for outer, inner in pairs):
            return tuple(
                slice(own.start + inner.start - outer.start, own.start + inner.stop - outer.start)
                for own, (outer, inner) in zip(ours, pairs, strict=True)
            )
    raise AssertionError(f"no box of this rank holds {cell}")
