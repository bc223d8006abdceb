"""How a dimension is cut over a group: pure arithmetic, no torch.

A cut follows ``torch.chunk``: slices of ``ceil(length / size)`` until the length is used
up, so the last ranks may hold less, or nothing. A packed dimension (q|k|v, gate|up) is a
list of segments, and each segment is cut on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from megablocks_core.groups.group import Group, check_group

Box = tuple[slice, ...]


def chunk_slice(length: int, parts: int, index: int) -> slice:
    """Slice ``index`` of ``length`` things cut into ``parts`` by the rule of ``torch.chunk``."""
    step = -(-length // parts)
    return slice(min(index * step, length), min((index + 1) * step, length))


def split_evenly(length: int, *, group: Group, name: str) -> slice:
    """This rank's slice of ``length`` things cut into equal parts.

    Raises:
        ValueError: ``length`` does not divide evenly; ``name`` is what the caller calls it.
    """
    check_group(group)
    if length % group.size:
        raise ValueError(f"{name}={length} must divide evenly over a group of {group.size} ranks")
    return chunk_slice(length, group.size, group.rank)


@dataclass(frozen=True)
class Segment:
    """One packed part of a dimension.

    Attributes:
        size: Its length in the whole tensor.
        parts: Number of different slices; ``None`` is one for each rank. When fewer than the
            ranks, neighbours hold the same slice, which counts once and whose gradient is
            summed over them (key and value heads fewer than ranks).
    """

    size: int
    parts: int | None = None

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size={self.size} must not be negative")
        if self.parts is not None and (self.parts < 1 or self.size % self.parts):
            raise ValueError(f"parts={self.parts} must be at least 1 and divide size={self.size}")

    def copies(self, group: Group) -> int:
        """Number of ranks of ``group`` that hold each slice."""
        return group.size // self.parts if self.parts is not None else 1

    def slice_of(self, rank: int, group: Group) -> slice:
        """What ``rank`` of ``group`` holds, counted from the start of the segment."""
        parts = group.size if self.parts is None else self.parts
        return chunk_slice(self.size, parts, rank // self.copies(group))


@dataclass(frozen=True)
class ShardSpec:
    """Dimension ``dim`` of a tensor is cut over ``group``.

    Attributes:
        dim: The cut dimension, 0 or more.
        group: The ranks that hold the slices.
        segments: The packed parts of the dimension, each cut on its own. Without them the
            cut is even: every rank holds ``whole / group.size``. An uneven cut is named by a
            single segment of the whole length.
    """

    dim: int
    group: Group
    segments: tuple[Segment, ...] | None = None

    def __post_init__(self) -> None:
        check_group(self.group)
        if self.dim < 0:
            raise ValueError(f"dim={self.dim} must be counted from the front (0 or more)")
        for segment in self.segments or ():
            if segment.parts is not None and self.group.size % segment.parts:
                raise ValueError(
                    f"parts={segment.parts} must divide the group of {self.group.size} ranks"
                )

    def whole_length(self, local_length: int) -> int:
        """Length of the dimension in the whole tensor, given this rank's share."""
        if self.segments is not None:
            return sum(segment.size for segment in self.segments)
        return local_length * self.group.size

    def ranges(self, whole_length: int, rank: int | None = None) -> list[slice]:
        """What ``rank`` (default: this one) holds of the whole, in the order it stores it."""
        rank = self.group.rank if rank is None else rank
        held, start = [], 0
        for segment in self._cut(whole_length):
            part = segment.slice_of(rank, self.group)
            held.append(slice(start + part.start, start + part.stop))
            start += segment.size
        return held

    def held_length(self, whole_length: int, rank: int | None = None) -> int:
        """How much of the whole ``rank`` (default: this one) holds."""
        return sum(part.stop - part.start for part in self.ranges(whole_length, rank))

    def counted(self, whole_length: int, rank: int | None = None) -> list[slice]:
        """The slices of a rank's share that count in sums over the group.

        A slice that neighbours hold too counts on the first of them only. The slices are
        those of the local tensor, not of the whole.
        """
        rank = self.group.rank if rank is None else rank
        counts, start = [], 0
        for segment in self._cut(whole_length):
            part = segment.slice_of(rank, self.group)
            length = part.stop - part.start
            if rank % segment.copies(self.group) == 0:
                counts.append(slice(start, start + length))
            start += length
        return counts

    def shared(self, local_length: int) -> list[tuple[int, int, int]]:
        """(start, length, parts) in a rank's share of each segment that neighbours hold too."""
        found, start = [], 0
        for segment in self._cut(self.whole_length(local_length)):
            part = segment.slice_of(self.group.rank, self.group)
            length = part.stop - part.start
            if segment.parts is not None and segment.copies(self.group) > 1:
                found.append((start, length, segment.parts))
            start += length
        return found

    @property
    def has_copies(self) -> bool:
        """Whether neighbours hold the same slice of some segment."""
        return any(segment.copies(self.group) > 1 for segment in self.segments or ())

    def _cut(self, whole_length: int) -> tuple[Segment, ...]:
        if self.segments is None:
            if whole_length % self.group.size:
                raise ValueError(
                    f"length {whole_length} of dimension {self.dim} must divide evenly over a "
                    f"group of {self.group.size} ranks, or be named by a Segment"
                )
            return (Segment(whole_length),)
        if sum(segment.size for segment in self.segments) != whole_length:
            raise ValueError(
                f"segments={self.segments} must add up to the length {whole_length} "
                f"of dimension {self.dim}"
            )
        return self.segments


class Specs(tuple[ShardSpec, ...]):
    """The cuts of one parameter, in order; empty if it is replicated.

    Attributes:
        each: Pattern of the separately named tensors that dimension 0 stacks, or ``None``.
        expert: Whether the copies lie on the expert data-parallel group.
    """

    each: str | None
    expert: bool

    def __new__(
        cls, specs: tuple[ShardSpec, ...] = (), *, each: str | None = None, expert: bool = False
    ) -> Specs:
        """Make the tuple, and what is said beside it."""
        self = super().__new__(cls, specs)
        self.each, self.expert = each, expert
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return (_specs, (tuple(self), self.each, self.expert))


def _specs(specs: tuple[ShardSpec, ...], each: str | None, expert: bool) -> Specs:
    return Specs(specs, each=each, expert=expert)


def whole_shape(local_shape: tuple[int, ...], specs: tuple[ShardSpec, ...]) -> tuple[int, ...]:
    """Shape of the whole tensor, given this rank's share and its cuts (the last is innermost)."""
    shape = list(local_shape)
    for spec in reversed(specs):
        shape[spec.dim] = spec.whole_length(shape[spec.dim])
    return tuple(shape)


def held_ranges(
    shape: tuple[int, ...], specs: tuple[ShardSpec, ...], ranks: dict[Group, int] | None = None
) -> list[list[slice]]:
    """For each dimension, the ranges of the whole that one rank holds, in storage order.

    Args:
        shape: Shape of the whole tensor.
        specs: Its cuts, in order.
        ranks: The rank asked for, in each group; default this process's.
    """
    held = [[slice(0, length)] for length in shape]
    for spec in specs:
        outer = held[spec.dim]
        length = sum(part.stop - part.start for part in outer)
        rank = None if ranks is None else ranks.get(spec.group)
        held[spec.dim] = [
            piece for inner in spec.ranges(length, rank) for piece in _within(outer, inner)
        ]
    return held


def own_slices(
    specs: tuple[ShardSpec, ...],
    shape: tuple[int, ...],
    ranks: dict[Group, int] | None = None,
) -> list[tuple[Box, Box]]:
    """The boxes of a whole tensor that one rank holds.

    Each is a pair of index tuples: into the whole tensor of ``shape`` and into the local one.
    Empty boxes are left out.
    """
    boxes: list[tuple[Box, Box]] = [((), ())]
    for ranges in held_ranges(shape, specs, ranks):
        grown, start = [], 0
        for part in _merged(ranges):
            local = slice(start, start + part.stop - part.start)
            start = local.stop
            if part.stop > part.start:
                grown.extend(((*whole, part), (*mine, local)) for whole, mine in boxes)
        boxes = grown
    return boxes


def _within(outer: list[slice], inner: slice) -> list[slice]:
    """``inner``, counted along the concatenation of ``outer``, as ranges of the whole."""
    pieces, start = [], 0
    for part in outer:
        length = part.stop - part.start
        low, high = max(inner.start - start, 0), min(inner.stop - start, length)
        if low < high:
            pieces.append(slice(part.start + low, part.start + high))
        start += length
    return pieces


def _merged(ranges: list[slice]) -> list[slice]:
    """Neighbouring ranges joined into one, so that a whole dimension is one range."""
    merged: list[slice] = []
    for part in ranges:
        if merged and merged[-1].stop == part.start:
            merged[-1] = slice(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return merged
