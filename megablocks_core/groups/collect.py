"""Whole logical tensors on the ranks that write them, a bounded bucket at a time, by marks.

No rank ever holds more than its own share, the pieces of one bucket, and the whole tensors of that
bucket which it writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Where one whole tensor lies: the boxes that each rank holds of it."""

    whole: Whole
    boxes: list[list[Box]]
    devices: dict[int, str]


@dataclass
class _Delivery:
    """One whole tensor on its way to one rank, and where its cells come from."""

    whole: Whole
    owner: int
    cells: list[Cell]
    devices: dict[int, str]

    @property
    def is_there(self) -> bool:
        """Whether the owner holds the whole tensor, in one piece."""
        return [cell.rank for cell in self.cells] == [self.owner]


class Collection:
    """Plan, agreed between all ranks, to bring whole tensors to ranks of ``group``.

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

    def visit(
        self,
        consume: Callable[[str, Tensor], None],
        owners: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Call ``consume(name, whole)`` on the ranks that a tensor is for, each in order.

        ``whole`` lies on the CPU and must not be changed or kept. Every rank must call this with
        the same ``owners``. An exception on one rank, in ``consume`` too, raises on all. Sends
        each element once to each owner that lacks it, and two small messages a bucket, which has
        tensors for all owners, so that they consume side by side.

        Args:
            consume: Takes a tensor.
            owners: By name the ranks, within the group, that a tensor is for; default the first.
        """
        for bucket in self._buckets(owners or {}):
            with self._together():
                outgoing = [self._outgoing(delivery) for delivery in bucket]
            arrived = [
                self._exchange(delivery, pieces)
                for delivery, pieces in zip(bucket, outgoing, strict=True)
            ]
            with self._together():
                for delivery, whole in zip(bucket, arrived, strict=True):
                    if delivery.owner == self._group.rank:
                        consume(delivery.whole.name, whole)

    def _together(self) -> AbstractContextManager[None]:
        return together(self._task, group=self._group, raises=self._raises)

    def _buckets(self, owners: Mapping[str, Sequence[int]]) -> Iterator[list[_Delivery]]:
        """Deliveries of about as many bytes to each rank, in the order of its plan."""
        waiting: dict[int, deque[_Source]] = {}
        for source in self._plan:
            for owner in owners.get(source.whole.name, (0,)):
                waiting.setdefault(owner, deque()).append(source)
        while waiting:
            limit, bucket = BUCKET_BYTES // len(waiting), []
            for owner in sorted(waiting):
                queue, size = waiting[owner], 0
                while queue and (not size or size + queue[0].whole.nbytes <= limit):
                    source = queue.popleft()
                    size += max(source.whole.nbytes, 1)
                    bucket.append(_delivery(source, owner))
                if not queue:
                    del waiting[owner]
            yield bucket

    def _outgoing(self, delivery: _Delivery) -> list[Tensor]:
        """On the owner the memory for the whole, on the others the pieces to send."""
        rank, name = self._group.rank, delivery.whole.name
        if rank == delivery.owner:
            if delivery.is_there:
                return [self._held[name].cpu()]
            return [torch.empty(delivery.whole.shape, dtype=delivery.whole.dtype)]
        return [
            as_bytes(self._held[name][_within(self._boxes[name], cell.box)])
            for cell in delivery.cells
            if cell.rank == rank
        ]

    def _exchange(self, delivery: _Delivery, pieces: list[Tensor]) -> Tensor:
        ranks, pg, owner = self._group.ranks, self._group.pg, delivery.owner
        if self._group.rank != owner:
            for piece in pieces:
                dist.send(piece, ranks[owner], group=pg)
            return torch.empty(0)
        (whole,) = pieces
        if delivery.is_there:
            return whole
        name = delivery.whole.name
        for cell in delivery.cells:
            if cell.rank == owner:
                whole[cell.box] = self._held[name][_within(self._boxes[name], cell.box)].cpu()
                continue
            shape = [part.stop - part.start for part in cell.box]
            piece = torch.empty(shape, dtype=whole.dtype, device=delivery.devices[cell.rank])
            dist.recv(as_bytes(piece), ranks[cell.rank], group=pg)
            whole[cell.box] = piece.cpu()
        return whole


def first_holders(boxes: Sequence[Sequence[Box]], *, before: int = 0) -> list[Cell]:
    """Cut what the ranks hold where any box begins or ends; each cell comes once.

    Args:
        boxes: For each rank, the boxes it holds of one whole tensor. Boxes of different
            ranks may overlap (replicas, slices that neighbours share).
        before: The rank that comes before all others.
    """
    num_dims = max((len(box) for held in boxes for box in held), default=0)
    ends = [
        sorted({end for held in boxes for box in held for end in (box[dim].start, box[dim].stop)})
        for dim in range(num_dims)
    ]
    holders: dict[tuple[tuple[int, int], ...], int] = {}
    for rank in sorted(range(len(boxes)), key=lambda rank: rank != before):
        for box in boxes[rank]:
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
    found = sum(prod(part.stop - part.start for part in cell.box) for cell in first_holders(boxes))
    if found != prod(whole.shape):
        raise ValueError(
            f"{whole.name}: the group holds {found} of the {prod(whole.shape)} elements of "
            f"shape {whole.shape}"
        )
    return _Source(whole, boxes, {rank: share.device for rank, share in holders})


def _delivery(source: _Source, owner: int) -> _Delivery:
    cells = first_holders(source.boxes, before=owner)
    return _Delivery(source.whole, owner, cells, source.devices)


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
