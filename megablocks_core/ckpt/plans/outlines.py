"""What all ranks hold, seen at once: the input of the two plans. Pure arithmetic.

Ranks send each other ``Packed`` outlines. Ranks that hold the same names send the same header,
which is read once; tensors whose boxes lie alike on all ranks share one ``Layout``, which is
worked out once. So plans for thousands of ranks and tensors take a second or two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from megablocks_core.ckpt.plans.boxes import Shape, as_array, as_boxes, cells, sizes, strides, tile
from megablocks_core.groups.cuts import Box


class Outline(NamedTuple):
    """One rank's part of one logical tensor, without its values.

    Attributes:
        name: "entry/logical name".
        dtype: Of the tensor.
        shape: Of the whole.
        boxes: What this rank holds of it; those of one rank are disjoint and not empty.
        whole: Whether one writer brings it together.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    boxes: list[Box]
    whole: bool = True


class Packed(NamedTuple):
    """One rank's outlines as a message: a header of JSON, and the ends of all boxes."""

    header: bytes
    ends: bytes


def pack(outlines: Sequence[Outline]) -> Packed:
    """Make the message of one rank."""
    header = [
        [name, str(dtype).removeprefix("torch."), shape, len(boxes), whole]
        for name, dtype, shape, boxes, whole in outlines
    ]
    ends = [as_array(one.boxes, len(one.shape)).reshape(-1) for one in outlines]
    flat = np.concatenate(ends) if ends else np.empty(0, dtype=np.int64)
    return Packed(json.dumps(header).encode(), flat.tobytes())


class Layout:
    """How the boxes of one whole tensor lie on the ranks, as disjoint cells.

    Attributes:
        shape: Of the whole tensor.
        cells: Array [cells, 2, dimensions].
        sizes: Elements of each cell.
        holders: The ranks that hold each cell, ascending, cell after cell.
        starts: Where the holders of each cell begin in ``holders``; one entry more at the end.
        covered: Whether the cells make the tensor whole.
    """

    def __init__(self, shape: Shape, boxes: np.ndarray, ranks: np.ndarray) -> None:
        self.shape = shape
        places = boxes @ strides(shape)
        order = np.lexsort((ranks, places[:, 1], places[:, 0]))
        boxes, ranks, places = boxes[order], ranks[order], places[order]
        is_new = np.ones(len(boxes), dtype=bool)
        is_new[1:] = (places[1:] != places[:-1]).any(axis=1)
        self.cells, self.holders = boxes[is_new], ranks
        self.starts = np.append(np.flatnonzero(is_new), len(boxes))
        self.covered = tile(self.cells, shape)
        if not self.covered:
            self._cut()
        self.sizes = sizes(self.cells)

    def _cut(self) -> None:
        """Some boxes overlap in part, or elements are missing: cut the boxes into cells."""
        found = cells(as_boxes(self.cells))
        holders = [
            np.unique(np.concatenate([self.holders_of(box) for box in inner])) for _, inner in found
        ]
        self.cells = as_array([cell for cell, _ in found], len(self.shape))
        self.holders = np.concatenate([*holders, np.empty(0, dtype=np.int64)])
        self.starts = np.cumsum([0, *map(len, holders)])
        self.covered = tile(self.cells, self.shape)

    def holders_of(self, cell: int) -> np.ndarray:
        """The ranks that hold one cell."""
        return self.holders[self.starts[cell] : self.starts[cell + 1]]

    @cached_property
    def ranks(self) -> np.ndarray:
        """All ranks that hold a part, ascending."""
        return np.unique(self.holders)

    @cached_property
    def copies(self) -> np.ndarray:
        """Number of holders of each cell."""
        return np.diff(self.starts)

    @cached_property
    def choices(self) -> np.ndarray:
        """The holders of each cell as rows [cells, most holders]; the first fills short rows."""
        columns = np.arange(self.copies.max(initial=1))
        columns = np.where(columns < self.copies[:, None], columns, 0)
        return self.holders[self.starts[:-1, None] + columns]

    def held_by(self, rank: int) -> np.ndarray:
        """For each cell, whether ``rank`` holds it."""
        held = np.zeros(len(self.cells), dtype=bool)
        held[np.repeat(np.arange(len(self.cells)), self.copies)[self.holders == rank]] = True
        return held


@dataclass
class Holding:
    """One logical tensor and where it lies."""

    name: str
    dtype: torch.dtype
    shape: Shape
    whole: bool
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return prod(self.shape) * self.dtype.itemsize


def holdings(packed: Sequence[Packed]) -> list[Holding]:
    """What the ranks hold together, in the order in which the first of them name it.

    Raises:
        ValueError: Ranks disagree on the shape or dtype of a tensor, or a box does not lie in it.
    """
    found: dict[str, _Found] = {}
    headers: dict[bytes, list[int]] = {}
    for rank, (header, _) in enumerate(packed):
        headers.setdefault(header, []).append(rank)
    for header, members in headers.items():
        ends = np.stack([np.frombuffer(packed[rank].ends, dtype=np.int64) for rank in members])
        columns, start, ranks = np.ascontiguousarray(ends.T), 0, np.array(members)
        for name, dtype, shape, count, whole in json.loads(header):
            stop = start + count * 2 * len(shape)
            one = _Found(name, getattr(torch, dtype), tuple(shape), whole)
            first = found.setdefault(name, one)
            if first != one:
                raise ValueError(
                    f"ranks disagree on {name}: shape {first.shape} of {first.dtype} and "
                    f"{one.shape} of {one.dtype}"
                )
            first.parts.append((ranks, columns[start:stop], count))
            start = stop
    layouts: dict[tuple[object, ...], Layout] = {}
    return [
        Holding(one.name, one.dtype, one.shape, one.whole, _layout(one, layouts))
        for one in found.values()
    ]


@dataclass
class _Found:
    name: str
    dtype: torch.dtype
    shape: Shape
    whole: bool
    # (ranks, the ends of their boxes [numbers, ranks], boxes of each rank), a part a header.
    parts: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list, compare=False)


def _layout(one: _Found, known: dict[tuple[object, ...], Layout]) -> Layout:
    key = (
        one.shape,
        *((ranks.tobytes(), ends.tobytes(), count) for ranks, ends, count in one.parts),
    )
    if key not in known:
        num_dims = len(one.shape)
        boxes, holders = [], []
        for ranks, ends, count in one.parts:
            if 0 in one.shape:  # nothing to hold: all who know of it hold the empty whole
                ends, count = np.tile(np.repeat([0, 1], num_dims)[:, None], len(ranks)), 1
                ends = ends * np.array(one.shape * 2)[:, None]
            boxes.append(ends.T.reshape(len(ranks) * count, 2, num_dims))
            holders.append(np.repeat(ranks, count))
        array = np.concatenate(boxes)
        if (array[:, 0] < 0).any() or (array[:, 1] > np.array(one.shape)).any():
            raise ValueError(f"{one.name}: a box must lie in the shape {one.shape}")
        known[key] = Layout(one.shape, array, np.concatenate(holders))
    return known[key]
