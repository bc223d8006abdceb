"""Boxes of whole logical tensors on the ranks that write them, a bounded round at a time, by marks.

No rank ever holds more than its own share and what it sends and gets in one round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megablocks_core.groups.cuts import Box, ShardSpec, own_slices, whole_shape
from megablocks_core.groups.group import Group
from megablocks_core.groups.outcome import together
from megablocks_core.groups.placements import local, placement_specs

# What a rank sends and gets in a round, unless a single delivery is more.
ROUND_BYTES = 64 * 2**20
# Tensors whose cells are remembered, as one is often asked for box by box.
_REMEMBERED = 64

NamedBox = tuple[str, Box]
T = TypeVar("T")


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
    """Where one whole tensor lies: the boxes that each rank holds of it, and the first's device."""

    whole: Whole
    boxes: list[list[Box]]
    device: str


@dataclass
class _Part:
    """One box on its way to one rank, and where its cells come from."""

    whole: Whole
    box: Box
    cells: list[Cell]
    is_there: bool

    def nbytes(self, box: Box) -> int:
        """The size of a part of the box."""
        return prod(_lengths(box)) * self.whole.dtype.itemsize


@dataclass
class _Delivery(Generic[T]):
    """What one rank wants at a time.

    Attributes:
        loads: By rank, the bytes that it sends or gets.
    """

    key: T
    owner: int
    parts: list[_Part]
    loads: Mapping[int, int]


class Collection:
    """Plan, agreed between all ranks, to bring boxes of whole tensors to ranks of ``group``.

    Args:
        held: This rank's shares; the placements of a DTensor cut inside its specs. A tensor need
            not be held on every rank, but the shares of all ranks together must make it whole.
        group: All ranks that hold shares.
        task: What to call the work in an error, such as "save('runs/step-10')".
        raises: What ranks raise when another one fails.
        order: Names as they shall come, where ranks hold different tensors; default those of the
            first rank, then what others hold besides.

    Attributes:
        wholes: The tensors: widest dtype first, so that a file of them in this order is aligned,
            and then by ``order``.

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
        sources.sort(
            key=lambda source: (
                -source.whole.dtype.itemsize,
                places.get(source.whole.name, len(places)),
            ),
        )
        self.wholes = [source.whole for source in sources]
        by_name = {source.whole.name: source for source in sources}

        @lru_cache(_REMEMBERED)
        def cells(owner: int, name: str) -> list[Cell]:
            return first_holders(by_name[name].boxes, before=owner)

        self._sources, self._cells = by_name, cells
        # Of messages: where this rank's tensors are, or those of others if it has none.
        own = [share.device for share in shares]
        self._device = next(iter([*own, *(source.device for source in sources)]), "cpu")

    def visit(
        self,
        wanted: Mapping[int, Iterable[tuple[T, Sequence[NamedBox]]]],
        consume: Callable[[T, list[Tensor]], None],
    ) -> None:
        """Call ``consume(key, values)`` on each rank for all that it wants, in order.

        ``values`` lie on the CPU and must not be changed or kept. Every rank must call this with
        the same ``wanted``. An exception on one rank, in ``consume`` too, raises on all. Sends
        each element that a rank lacks once for each of its boxes that has it, in one all-to-all a
        round beside two small messages; a round has something for as many ranks as can be, so
        that they consume side by side.

        Args:
            wanted: By rank, within the group, keys and the boxes that are wanted at a time: tensor
                names, and slices with both ends for each dimension. A round is little more than
                ``ROUND_BYTES`` on any rank if these are.
            consume: Takes a key and the values of its boxes.
        """
        for deliveries in self._rounds(wanted):
            with self._together():
                outgoing = self._outgoing(deliveries)
            incoming = self._exchanged(deliveries, outgoing)
            del outgoing
            with self._together():
                for delivery in deliveries:
                    if delivery.owner == self._group.rank:
                        consume(delivery.key, self._values(delivery, incoming))

    def _together(self) -> AbstractContextManager[None]:
        return together(self._task, group=self._group, raises=self._raises)

    def _rounds(
        self, wanted: Mapping[int, Iterable[tuple[T, Sequence[NamedBox]]]]
    ) -> Iterator[list[_Delivery[T]]]:
        """Deliveries to the ranks in turn, until none that is next fits any more."""
        queues = {owner: self._deliveries(owner, wanted[owner]) for owner in sorted(wanted)}
        heads = {owner: next(queue, None) for owner, queue in queues.items()}
        while any(heads.values()):
            found: list[_Delivery[T]] = []
            loads: Counter[int] = Counter()
            before = -1
            while before < len(found):
                before = len(found)
                for owner, head in heads.items():
                    if head is None or (found and _exceeds(loads, head.loads)):
                        continue
                    found.append(head)
                    loads.update(head.loads)
                    heads[owner] = next(queues[owner], None)
            yield found

    def _deliveries(
        self, owner: int, wanted: Iterable[tuple[T, Sequence[NamedBox]]]
    ) -> Iterator[_Delivery[T]]:
        for key, boxes in wanted:
            parts, loads = [self._part(owner, name, box) for name, box in boxes], Counter[int]()
            for part in parts:
                loads[owner] += part.nbytes(part.box)
                for rank, box in part.cells:
                    loads[rank] += part.nbytes(box) if rank != owner else 0
            yield _Delivery(key, owner, parts, loads)

    def _part(self, owner: int, name: str, box: Box) -> _Part:
        source = self._sources[name]
        is_there = any(_lies_in(box, own) for own in source.boxes[owner])
        cells = [] if is_there else _common(self._cells(owner, name), box)
        return _Part(source.whole, box, cells, is_there)

    def _outgoing(self, deliveries: Sequence[_Delivery[T]]) -> list[list[Tensor]]:
        """For each rank the pieces it lacks and this one sends, in bytes."""
        pieces: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        for delivery in deliveries:
            if delivery.owner != self._group.rank:
                pieces[delivery.owner] += [
                    as_bytes(self._own(part.whole.name, cell.box))
                    for part in delivery.parts
                    for cell in part.cells
                    if cell.rank == self._group.rank
                ]
        return pieces

    def _exchanged(
        self, deliveries: Sequence[_Delivery[T]], outgoing: list[list[Tensor]]
    ) -> list[Tensor]:
        """The bytes that each rank has sent to this one: one all-to-all."""
        rank, sizes = self._group.rank, [0] * self._group.size
        for part in (part for one in deliveries if one.owner == rank for part in one.parts):
            for cell in part.cells:
                sizes[cell.rank] += part.nbytes(cell.box) if cell.rank != rank else 0
        sent = [sum(map(len, pieces)) for pieces in outgoing]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        if self._group.size > 1:
            flat = [piece for pieces in outgoing for piece in pieces]
            given = torch.cat(flat) if flat else received.new_empty(0)
            dist.all_to_all_single(received, given, sizes, sent, group=self._group.pg)
        return list(received.cpu().split(sizes))

    def _values(self, delivery: _Delivery[T], incoming: list[Tensor]) -> list[Tensor]:
        """The values of each box; what is used of ``incoming`` is taken from it."""
        values = []
        for part in delivery.parts:
            if part.is_there:
                values.append(self._own(part.whole.name, part.box).cpu())
                continue
            whole = torch.empty(_lengths(part.box), dtype=part.whole.dtype)
            for cell in part.cells:
                into = whole[_inside(cell.box, part.box)]
                if cell.rank == self._group.rank:
                    into.copy_(self._own(part.whole.name, cell.box))
                    continue
                size = part.nbytes(cell.box)
                piece, incoming[cell.rank] = incoming[cell.rank].split(
                    [size, len(incoming[cell.rank]) - size]
                )
                # Bytes of other pieces before these may have moved them off their alignment.
                into.copy_(piece.clone().view(into.dtype).view(into.shape))
            values.append(whole)
        return values

    def _own(self, name: str, box: Box) -> Tensor:
        """The values of a box that lies in one that this rank holds."""
        for theirs, ours in self._boxes[name]:
            if _lies_in(box, theirs):
                return self._held[name][ours][_inside(box, theirs)]
        raise AssertionError(f"no box of this rank holds {box} of {name}")


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
    return _Source(whole, boxes, holders[0][1].device)


def _exceeds(loads: Mapping[int, int], more: Mapping[int, int]) -> bool:
    return any(loads[rank] + size > ROUND_BYTES for rank, size in more.items())


def _lengths(box: Box) -> list[int]:
    return [part.stop - part.start for part in box]


def _lies_in(box: Box, outer: Box) -> bool:
    return all(
        whole.start <= part.start and part.stop <= whole.stop
        for part, whole in zip(box, outer, strict=True)
    )


def _inside(box: Box, outer: Box) -> Box:
    """The slices of ``outer`` that hold ``box``, which lies in it."""
    return tuple(
        slice(part.start - whole.start, part.stop - whole.start)
        for part, whole in zip(box, outer, strict=True)
    )


def _common(cells: Sequence[Cell], box: Box) -> list[Cell]:
    """What of a box lies in each cell that has a part of it."""
    found = []
    for rank, cell in cells:
        both = tuple(
            slice(max(part.start, whole.start), min(part.stop, whole.stop))
            for part, whole in zip(cell, box, strict=True)
        )
        if all(part.start < part.stop for part in both):
            found.append(Cell(rank, both))
    return found
