"""How a batch of sequences is gone through: as many chunks and heads at a time as caches hold.

Only sizes decide, never what a tensor holds.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

# Numbers that are worked on at a time.
_ON_CPU, _ON_DEVICE = 1 << 21, 1 << 27

# The state before each so many chunks is kept for backward.
EVERY = 8


class Region(NamedTuple):
    """Chunks of equal length, side by side, of some rows.

    Attributes:
        rows: Which rows.
        start: The first token.
        number: How many chunks.
        length: Tokens of each.
        chunk: The number of the first chunk in its row.
        kept: How many states of the row are kept before that of the first chunk.
    """

    rows: slice
    start: int
    number: int
    length: int
    chunk: int
    kept: int

    def of(self, tokens: Tensor) -> Tensor:
        """Its part of [B L ...] as a view [c b q ...]."""
        part = tokens[self.rows, self.start : self.start + self.number * self.length]
        return part.unflatten(1, (self.number, self.length)).transpose(0, 1)


class Lane(NamedTuple):
    """Some heads, which know nothing of others.

    Attributes:
        groups: Their groups.
        inside: Which heads of each of these; all, if groups are several.
        heads: Which of all heads.
    """

    groups: slice
    inside: slice
    heads: slice

    def of(self, x: Tensor) -> Tensor:
        """Their part of [c b G q J ...], a view."""
        return x[:, :, self.groups, :, self.inside]


class Plan(NamedTuple):
    """How much at a time.

    Attributes:
        rows: Rows.
        chunks: Chunks, a power of 2.
        lanes: Heads.
    """

    rows: int
    chunks: int
    lanes: list[Lane]


def plan_of(x: Tensor, B: Tensor, chunk_size: int) -> Plan:
    """The plan for x [B L H P] and B [B L G N]."""
    (length, heads, features), (groups, states) = x.shape[1:], B.shape[2:]
    per_head = 2 * chunk_size**2 + 6 * chunk_size * features + 4 * features * states
    room = max(1, (_ON_CPU if x.device.type == "cpu" else _ON_DEVICE) // per_head)
    each = heads // groups
    if room < heads:
        lanes = _lanes(groups, each, groups_at_a_time=max(1, room // each), heads=min(each, room))
        return Plan(1, 1, lanes)
    chunks = min(EVERY, room // heads)
    whole = max(1, length // chunk_size)
    lanes = _lanes(groups, each, groups_at_a_time=groups, heads=each)
    return Plan(max(1, room // (heads * whole)), 1 << (chunks.bit_length() - 1), lanes)


def _lanes(groups: int, each: int, *, groups_at_a_time: int, heads: int) -> list[Lane]:
    lanes = []
    for group in range(0, groups, groups_at_a_time):
        stop = min(group + groups_at_a_time, groups)
        for head in range(0, each, heads):
            inside = slice(head, min(head + heads, each))
            neighbours = slice(group * each + head, (stop - 1) * each + inside.stop)
            lanes.append(Lane(slice(group, stop), inside, neighbours))
    return lanes


def count_kept(length: int, chunk_size: int, every: int) -> int:
    """How many states of a row are kept: those before its 1st, (every + 1)th, ... whole chunk.

    And that before the last chunk, if it is shorter.
    """
    whole, rest = length // chunk_size, length % chunk_size
    return (whole + every - 1) // every + (rest + chunk_size - 1) // chunk_size


def regions(x: Tensor, chunk_size: int, every: int, rows: int) -> Iterator[list[Region]]:
    """The whole chunks of some rows of ``x`` [B L H P] and their shorter one, then the next."""
    batch, length = x.shape[:2]
    whole, rest = length // chunk_size, length % chunk_size
    for row in range(0, batch, rows):
        some = slice(row, min(row + rows, batch))
        parts = [
            Region(some, 0, whole, chunk_size, 0, 0),
            Region(some, whole * chunk_size, 1, rest, whole, -(-whole // every)),
        ]
        yield [part for part in parts if part.number and part.length]
