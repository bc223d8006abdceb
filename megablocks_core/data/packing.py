"""Packs items of different lengths into few bins of one capacity, the longest first."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megablocks_core.data.checks import row, whole_number
from megablocks_core.data.extension import native as _native


class Bins(NamedTuple):
    """Bin b holds ``items[bounds[b] : bounds[b + 1]]``, the longest first."""

    items: NDArray[np.int64]  # [number of items], each number once
    bounds: NDArray[np.int64]  # [number of bins + 1]


def first_fit_decreasing(lengths: Sequence[int] | NDArray[np.integer], capacity: int) -> Bins:
    """Put each item, the longest first, into the first bin that has room for it.

    Of equal lengths the one that comes first is put first; so the result depends on nothing else.
    At most 11/9 of the fewest possible bins, and 6/9 of one, are used. Takes O(n log n) steps.

    Shapes: ``lengths`` [n], whole numbers. Sends nothing.

    Raises:
        ValueError: a length that is negative or above ``capacity``, or not a whole number.

    Source: D. S. Johnson, Near-optimal bin packing algorithms, MIT, 1973; the bound is that of
    Dosa, ESCAPE 2007.
    """
    given, capacity = _checked(lengths, capacity)
    order = np.argsort(-given, kind="stable")
    bins = np.empty(len(given), np.int64)
    fit = first_fit_numpy if _native is None else _native.first_fit
    fit(given[order], capacity=capacity, bins=bins)
    return _by_bin(order, bins)


def first_fit_numpy(lengths: NDArray[np.int64], *, capacity: int, bins: NDArray[np.int64]) -> None:
    """Write the bin of each item: the plain twin of the C++.

    A tree over all bins there may be: a node knows the most room of any bin below it.
    """
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    most = [capacity] * (2 * leaves)
    for item, length in enumerate(lengths.tolist()):
        node = 1
        while node < leaves:
            node *= 2
            node += most[node] < length
        bins[item] = node - leaves
        most[node] -= length
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])


def best_fit_decreasing(lengths: Sequence[int] | NDArray[np.integer], capacity: int) -> Bins:
    """Put each item, the longest first, into the bin that it leaves the least room in.

    Of equal lengths the one that comes first is put first; of bins with equal room, the one that
    came to have it last takes it. Leaves fewer and fuller bins open than first fit, for the same
    bound. Takes O(n log n) steps, and one for each 64 of ``capacity`` an item.

    Shapes: ``lengths`` [n], whole numbers. Sends nothing.

    Raises:
        ValueError: a length that is negative or above ``capacity``, or not a whole number.

    Source: D. S. Johnson, Near-optimal bin packing algorithms, MIT, 1973.
    """
    given, capacity = _checked(lengths, capacity)
    order = np.argsort(-given, kind="stable")
    bins = np.empty(len(given), np.int64)
    by_room: dict[int, list[int]] = {}
    rooms = opened = 0  # bit r of ``rooms``: some bin has room r
    for item, length in enumerate(given[order].tolist()):
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            taken = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, taken, opened = capacity, opened, opened + 1
        by_room.setdefault(room - length, []).append(taken)
        rooms |= 1 << (room - length)
        bins[item] = taken
    return _by_bin(order, bins)


def _checked(
    lengths: Sequence[int] | NDArray[np.integer], capacity: int
) -> tuple[NDArray[np.int64], int]:
    given, capacity = row("lengths", lengths), whole_number("capacity", capacity, 0)
    wrong = (given < 0) | (given > capacity)
    if wrong.any():
        item = int(wrong.argmax())
        raise ValueError(f"lengths[{item}]={given[item]} must be between 0 and {capacity=}")
    return given, capacity


def _by_bin(order: NDArray[np.int64], bins: NDArray[np.int64]) -> Bins:
    """The items of each bin, in the order in which they were put there."""
    by_bin = np.argsort(bins, kind="stable")
    return Bins(order[by_bin], np.concatenate([[0], np.bincount(bins).cumsum()]))
