"""Who reads which blocks, and who sends what to whom, in which round. Pure arithmetic.

A block is read by one rank, that which needs most of it; ranks with equal need take turns. What
others need of it is sent on in the same round. Every rank works out the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from megablocks_core.ckpt.boxes import as_boxes, flat_boxes, intersection, moved
from megablocks_core.ckpt.manifest import BLOCK_BYTES, Chunk, StoredAs
from megablocks_core.ckpt.outlines import Holding
from megablocks_core.ckpt.overlaps import Needs, Overlaps, find_needs
from megablocks_core.ckpt.rounds import BUCKET_BYTES, Rounds
from megablocks_core.groups.cuts import Box


class Segment(NamedTuple):
    """Elements [start, stop) of a chunk as a run; they lie in one block."""

    name: str
    chunk: Chunk
    start: int
    stop: int


class Cut(NamedTuple):
    """A box of a whole tensor whose elements are one run of a segment, or boxes of such a run.

    Attributes:
        segment: Its number in the round.
        run: The box of the run in the segment, counted from the start of the chunk.
        box: What is needed of it, counted in the whole tensor.
    """

    segment: int
    run: Box
    box: Box


@dataclass
class LoadRound:
    """What one rank does in one round. Two ranks list what travels between them in one order.

    Attributes:
        segments: What it reads, in the order of the files.
        cuts: What is needed of that.
        own: The numbers of the cuts it needs itself.
        outgoing: For each other rank, the numbers of the cuts it is sent.
        incoming: For each other rank, the (tensor, box) that it sends.
    """

    segments: list[Segment] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    outgoing: dict[int, list[int]] = field(default_factory=dict)
    incoming: dict[int, list[tuple[str, Box]]] = field(default_factory=dict)


def plan_load(
    wanted: Sequence[Holding],
    stored: Mapping[str, StoredAs],
    rank: int,
    *,
    num_ranks: int,
    limit: int = BUCKET_BYTES,
) -> list[LoadRound]:
    """The work of ``rank``, in as many rounds on every rank.

    Args:
        wanted: What the ranks want together; every tensor is stored, in the same shape.
        stored: Where all tensors lie.
        rank: This rank.
        num_ranks: Number of ranks.
        limit: Bytes that a rank holds beside its state in a round.
    """
    needs, overlaps = find_needs(wanted, stored)
    wants = _wants(needs, wanted, num_ranks)
    rounds, number = _rounds(wants, num_ranks, limit)
    plan = [LoadRound() for _ in range(rounds)]
    _note(plan, number, wants, needs, overlaps, wanted, stored, rank)
    return plan


class _Wants(NamedTuple):
    """Who needs what of which block.

    Attributes:
        needs: Number of the part that is needed; one entry for each rank that needs it.
        ranks: The rank.
        blocks: Number of the block among those that are read; entries are sorted by it.
        readers: For each block, the rank that reads it.
        block_ranks: The ranks that need something of a block, block after block ...
        block_bytes: ... and how much.
        starts: Where a block begins in those two; one entry more at the end.
    """

    needs: np.ndarray
    ranks: np.ndarray
    blocks: np.ndarray
    readers: np.ndarray
    block_ranks: np.ndarray
    block_bytes: np.ndarray
    starts: np.ndarray


def _wants(needs: Needs, wanted: Sequence[Holding], num_ranks: int) -> _Wants:
    # All holders of all cells, one after the other; ``first`` is where those of a cell begin.
    copies = np.concatenate([np.empty(0, int), *(one.layout.copies for one in wanted)])
    holders = np.concatenate([np.empty(0, int), *(one.layout.holders for one in wanted)])
    first = np.cumsum(copies) - copies
    cells = np.cumsum([0] + [len(one.layout.cells) for one in wanted])[needs.tensors] + needs.cells
    # Needs come tensor by tensor and chunk by chunk, which sorting by block keeps.
    order = np.argsort(needs.blocks, kind="stable")
    counts = copies[cells[order]]
    which = np.repeat(order, counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    ranks = holders[first[cells[which]] + within]
    blocks = _numbered(needs.blocks[which])
    pairs = blocks * num_ranks + ranks
    by_pair = np.argsort(pairs, kind="stable")
    starts = np.flatnonzero(np.diff(pairs[by_pair], prepend=-1))
    nbytes = np.add.reduceat(needs.nbytes[which][by_pair], starts) if len(starts) else pairs
    block_of, block_ranks = np.divmod(pairs[by_pair][starts], num_ranks)
    starts = np.searchsorted(block_of, np.arange(blocks[-1] + 2 if len(blocks) else 1))
    readers = _readers(block_of, block_ranks, nbytes, starts)
    return _Wants(which, ranks, blocks, readers, block_ranks, nbytes, starts)


def _numbered(blocks: np.ndarray) -> np.ndarray:
    """Sorted numbers as 0, 1, 2 ... without gaps."""
    return np.cumsum(np.diff(blocks, prepend=blocks[:1]) > 0)


def _readers(
    block_of: np.ndarray, block_ranks: np.ndarray, nbytes: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """The rank that needs most of each block; of several, another one from block to block."""
    if not len(nbytes):
        return np.empty(0, dtype=np.int64)
    most = np.maximum.reduceat(nbytes, starts[:-1])
    ties = np.flatnonzero(nbytes == most[block_of])
    first = np.searchsorted(block_of[ties], np.arange(len(starts)))
    turn = np.arange(len(most)) % np.diff(first)
    return block_ranks[ties[first[:-1] + turn]]


def _rounds(wants: _Wants, num_ranks: int, limit: int) -> tuple[int, np.ndarray]:
    """Number of rounds, and that of each block; readers go on side by side."""
    readers = wants.readers
    rounds = Rounds(num_ranks, limit)
    number = np.zeros(len(readers), dtype=np.int64)
    reached = np.zeros(num_ranks, dtype=np.int64)
    order = np.argsort(readers, kind="stable")
    first = np.searchsorted(readers[order], np.arange(num_ranks))
    turn = np.empty(len(readers), dtype=np.int64)
    turn[order] = np.arange(len(readers)) - first[readers[order]]
    for block in np.lexsort((readers, turn)):
        span = slice(wants.starts[block], wants.starts[block + 1])
        reader, ranks = readers[block], wants.block_ranks[span]
        nbytes = wants.block_bytes[span].copy()
        mine = ranks == reader
        nbytes[mine] += BLOCK_BYTES + nbytes.sum() - 2 * nbytes[mine]
        reached[reader] = number[block] = rounds.place(ranks, nbytes, first=int(reached[reader]))
    return len(rounds), number


def _note(
    plan: list[LoadRound],
    number: np.ndarray,
    wants: _Wants,
    needs: Needs,
    overlaps: Sequence[Overlaps],
    wanted: Sequence[Holding],
    stored: Mapping[str, StoredAs],
    rank: int,
) -> None:
    """Write down what concerns ``rank``, block after block."""
    readers = wants.readers[wants.blocks]
    mine = np.flatnonzero((readers == rank) | (wants.ranks == rank))
    turns = number[wants.blocks[mine]]
    columns = (wants.needs[mine], turns, readers[mine], wants.ranks[mine])
    entries = zip(*(column.tolist() for column in columns), strict=True)
    for (need, turn, reader), holders in groupby(entries, key=itemgetter(0, 1, 2)):
        tensor, work = int(needs.tensors[need]), plan[turn]
        name = wanted[tensor].name
        chunk = stored[name].chunks[needs.chunks[need]]
        segment = Segment(name, chunk, int(needs.starts[need]), int(needs.stops[need]))
        (overlap,) = as_boxes(overlaps[tensor].boxes[needs.boxes[need]][None])
        pairs = _boxes(segment, overlap)
        if reader != rank:
            work.incoming.setdefault(reader, []).extend((name, box) for _, box in pairs)
            continue
        if not work.segments or work.segments[-1] != segment:
            work.segments.append(segment)
        cuts = range(len(work.cuts), len(work.cuts) + len(pairs))
        work.cuts += [Cut(len(work.segments) - 1, *pair) for pair in pairs]
        for _, _, _, holder in holders:
            own = work.own if holder == rank else work.outgoing.setdefault(holder, [])
            own.extend(cuts)


def _boxes(segment: Segment, overlap: Box) -> list[tuple[Box, Box]]:
    """(run, box in the whole) of what an overlap has in a segment."""
    found = []
    for run in flat_boxes(segment.start, segment.stop, segment.chunk.shape):
        both = intersection(run, overlap)
        if both is not None:
            found.append((run, moved(both, segment.chunk.box)))
    return found
