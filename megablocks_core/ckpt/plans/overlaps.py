"""Which stored chunks the wanted cells lie in, as arrays of numbers. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megablocks_core.ckpt.manifest import BLOCK_BYTES, DTYPES, StoredAs
from megablocks_core.ckpt.plans.boxes import as_array
from megablocks_core.ckpt.plans.outlines import Holding, Layout


class Overlaps(NamedTuple):
    """What cells and chunks have in common; one entry an overlap.

    Attributes:
        chunks: Number of the chunk.
        cells: Number of the cell.
        boxes: Array [overlaps, 2, dimensions], counted from the start of the chunk.
        starts: First element, in the chunk as a run.
        stops: End of the last element there.
    """

    chunks: np.ndarray
    cells: np.ndarray
    boxes: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Needs(NamedTuple):
    """Parts of overlaps that lie in one block each; one entry a part, block after block.

    In a block, parts of one chunk stand next to each other. If each of them is a run, each has a
    segment of its own, so that it can be read straight to where it is needed. Otherwise all share
    one segment, from the first element that is needed to the last.

    Attributes:
        tensors: Number of the tensor.
        chunks: Number of the chunk in its tensor.
        cells: Number of the cell in its tensor's layout.
        boxes: Number of the overlap in its tensor.
        blocks: Number of the block, over all files.
        starts: First element, in the chunk as a run, of the segment.
        stops: End of the segment there.
        nbytes: Bytes of the overlap that lie in the block.
        lengths: Bytes of the segment.
    """

    tensors: np.ndarray
    chunks: np.ndarray
    cells: np.ndarray
    boxes: np.ndarray
    blocks: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    nbytes: np.ndarray
    lengths: np.ndarray


def find_needs(
    wanted: Sequence[Holding], stored: Mapping[str, StoredAs]
) -> tuple[Needs, list[Overlaps]]:
    """What is needed of which block: all parts, by block, and the overlaps of each tensor."""
    first_blocks = _first_blocks(stored)
    known: dict[tuple[int, bytes], Overlaps] = {}
    alike: dict[tuple[int, int], _Alike] = {}
    overlaps = []
    for number, tensor in enumerate(wanted):
        chunks = stored[tensor.name].chunks
        boxes = as_array([chunk.box for chunk in chunks], len(tensor.shape))
        key = (id(tensor.layout), boxes.tobytes())
        if key not in known:
            known[key] = overlap(tensor.layout, boxes)
        overlaps.append(known[key])
        itemsize = DTYPES[stored[tensor.name].dtype].itemsize
        one = alike.setdefault((id(known[key]), itemsize), _Alike(known[key], boxes, itemsize))
        one.tensors.append(number)
        one.offsets.append([chunk.offset for chunk in chunks])
        one.first_blocks.append([first_blocks[chunk.file] for chunk in chunks])
    parts = [_parts(one) for one in alike.values()]
    columns = zip(*parts, strict=True) if parts else [[np.empty(0, dtype=np.int64)]] * 9
    needs = Needs(*(np.concatenate(column) for column in columns))
    order = np.lexsort((needs.boxes, needs.tensors, needs.blocks))
    return _joined(Needs(*(column[order] for column in needs))), overlaps


def _joined(needs: Needs) -> Needs:
    """Parts of a chunk in a block that are not all runs, with one segment for all.

    Each comes with the ends of its overlap in the block. It is a run if it has all bytes between.
    """
    if not len(needs.blocks):
        return needs
    which = np.stack([needs.blocks, needs.tensors, needs.chunks])
    first = np.flatnonzero(np.append(True, (which[:, 1:] != which[:, :-1]).any(axis=0)))
    counts = np.diff(np.append(first, len(needs.blocks)))
    apart = np.repeat(np.logical_and.reduceat(needs.nbytes == needs.lengths, first), counts)
    starts = np.repeat(np.minimum.reduceat(needs.starts, first), counts)
    stops = np.repeat(np.maximum.reduceat(needs.stops, first), counts)
    itemsizes = needs.lengths // (needs.stops - needs.starts)
    return needs._replace(
        starts=np.where(apart, needs.starts, starts),
        stops=np.where(apart, needs.stops, stops),
        lengths=np.where(apart, needs.lengths, (stops - starts) * itemsizes),
    )


def overlap(layout: Layout, chunks: np.ndarray) -> Overlaps:
    """What the cells of a layout and chunks (an array of boxes) have in common."""
    cells = layout.cells
    if not layout.shape:
        pairs = np.zeros((2, min(len(cells), len(chunks))), dtype=np.int64)
    else:
        pairs = _pairs(cells[:, :, 0], chunks[:, :, 0])
    low = np.maximum(cells[pairs[0], 0], chunks[pairs[1], 0])
    high = np.minimum(cells[pairs[0], 1], chunks[pairs[1], 1])
    meet = (low < high).all(axis=1)
    pairs, low, high = pairs[:, meet], low[meet], high[meet]
    boxes = np.stack([low, high], axis=1) - chunks[pairs[1], :1]
    shapes = chunks[pairs[1], 1] - chunks[pairs[1], 0]
    steps = np.ones_like(shapes)
    for dim in range(shapes.shape[1] - 2, -1, -1):
        steps[:, dim] = steps[:, dim + 1] * shapes[:, dim + 1]
    starts = (boxes[:, 0] * steps).sum(axis=1)
    stops = ((boxes[:, 1] - 1) * steps).sum(axis=1) + 1
    return Overlaps(pairs[1], pairs[0], boxes, starts, stops)


def _pairs(cells: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Pairs (cell, chunk) that may meet, judged by the first dimension (arrays [boxes, 2])."""
    # Cells are sorted by where they begin. Those that can meet a chunk begin before it ends, and
    # come after all that end before it begins.
    ends = np.maximum.accumulate(cells[:, 1])
    first = np.searchsorted(ends, chunks[:, 0], side="right")
    last = np.searchsorted(cells[:, 0], chunks[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(chunks)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([first[which] + within, which])


@dataclass
class _Alike:
    """Tensors whose overlaps are the same, but for where their chunks lie.

    Attributes:
        found: The overlaps.
        boxes: Of the chunks, [chunks, 2, dimensions].
        itemsize: Bytes of an element.
        tensors: Numbers of the tensors.
        offsets: Of the chunks in their files, for each tensor.
        first_blocks: Numbers of the first blocks of these files, for each tensor.
    """

    found: Overlaps
    boxes: np.ndarray
    itemsize: int
    tensors: list[int] = field(default_factory=list)
    offsets: list[list[int]] = field(default_factory=list)
    first_blocks: list[list[int]] = field(default_factory=list)


def _parts(alike: _Alike) -> tuple[np.ndarray, ...]:
    boxes, itemsize = alike.boxes, alike.itemsize
    tensors = np.repeat(np.array(alike.tensors), len(alike.found.chunks))
    found = Overlaps(*(np.concatenate([one] * len(alike.tensors)) for one in alike.found))
    number = np.tile(np.arange(len(alike.found.chunks)), len(alike.tensors))
    offsets, base = (
        np.array(one, dtype=np.int64)[:, alike.found.chunks].reshape(-1)
        for one in (alike.offsets, alike.first_blocks)
    )
    first = (offsets + found.starts * itemsize) // BLOCK_BYTES
    counts = (offsets + found.stops * itemsize - 1) // BLOCK_BYTES - first + 1
    which = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = first[which] + within
    numel = np.prod(boxes[:, 1] - boxes[:, 0], axis=1)[found.chunks[which]]
    begin = blocks * BLOCK_BYTES - offsets[which]
    starts = np.minimum(np.maximum(begin // itemsize, 0), numel)
    stops = np.minimum((begin + BLOCK_BYTES) // itemsize, numel)
    shapes = (boxes[:, 1] - boxes[:, 0])[found.chunks[which]]
    inner = found.boxes[which]
    nbytes = (before(inner, shapes, stops) - before(inner, shapes, starts)) * itemsize
    starts = np.maximum(starts, found.starts[which])
    stops = np.minimum(stops, found.stops[which])
    held = np.flatnonzero(nbytes)  # a block may lie between two rows of a box
    which = which[held]
    return (
        tensors[which],
        found.chunks[which],
        found.cells[which],
        number[which],
        blocks[held] + base[which],
        starts[held],
        stops[held],
        nbytes[held],
        (stops - starts)[held] * itemsize,
    )


def before(boxes: np.ndarray, shapes: np.ndarray, places: np.ndarray) -> np.ndarray:
    """How many elements of each box come before a place in its flattened tensor.

    Args:
        boxes: Array [boxes, 2, dimensions].
        shapes: Of the tensor in which each box lies, [boxes, dimensions].
        places: One number a box, at most the tensor's number of elements.
    """
    total = np.zeros(len(boxes), dtype=np.int64)
    on_edge = np.ones(len(boxes), dtype=bool)  # whether the rows that hold the place are in the box
    lengths = boxes[:, 1] - boxes[:, 0]
    rest, row = places.copy(), np.prod(shapes, axis=1, dtype=np.int64)
    inner = np.prod(lengths, axis=1, dtype=np.int64)
    for dim in range(shapes.shape[1]):
        row //= shapes[:, dim]
        inner //= lengths[:, dim]
        index, rest = rest // row, rest % row
        rows = np.clip(index - boxes[:, 0, dim], 0, lengths[:, dim])
        total += np.where(on_edge, rows * inner, 0)
        on_edge &= (boxes[:, 0, dim] <= index) & (index < boxes[:, 1, dim])
    return np.where(shapes.shape[1] == 0, places, total)


def _first_blocks(stored: Mapping[str, StoredAs]) -> dict[str, int]:
    """A number for the first block of each file, so that all blocks have numbers of their own."""
    ends: dict[str, int] = {}
    for tensor in stored.values():
        for chunk in tensor.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), tensor.end_of(chunk))
    starts = np.cumsum([0] + [-(-end // BLOCK_BYTES) for end in ends.values()])
    return dict(zip(ends, starts.tolist(), strict=False))
