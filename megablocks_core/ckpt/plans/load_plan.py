"""Who reads which blocks, and who hands what to whom, in which round. Pure arithmetic.

A block is read by one rank, that which needs most of it; ranks with equal need take turns. What
others need of it they get in the same round: those on the reader's host from a window, memory of
the reader that they see; the others by message. Every rank works out the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from megablocks_core.ckpt.manifest import BLOCK_BYTES, Chunk, StoredAs
from megablocks_core.ckpt.plans.boxes import as_boxes, flat_boxes, intersection, moved
from megablocks_core.ckpt.plans.outlines import Holding
from megablocks_core.ckpt.plans.overlaps import Needs, Overlaps, find_needs
from megablocks_core.ckpt.plans.rounds import BUCKET_BYTES, Rounds
from megablocks_core.groups.cuts import Box

# A block, and what rows that are cut inside blocks leave for others. Pages of a window that are
# still in a core's cache, and used again, cost less than the rounds that larger windows would save.
SMALL_BYTES = BLOCK_BYTES + 2**16
_ALIGNMENT = 64


class Segment(NamedTuple):
    """Elements [start, stop) of a chunk as a run; they lie in one block."""

    name: str
    chunk: Chunk
    start: int
    stop: int


class Part(NamedTuple):
    """A box of a whole tensor whose elements are one run of a segment, or boxes of such a run.

    Attributes:
        run: The box of the run in the segment, counted from the start of the chunk.
        box: What is needed of it, counted in the whole tensor.
    """

    run: Box
    box: Box


class Cut(NamedTuple):
    """A part of the segment of that number in the round."""

    segment: int
    part: Part


class Seen(NamedTuple):
    """A segment that lies in another rank's window, from byte ``place`` on, and what is needed."""

    rank: int
    place: int
    segment: Segment
    parts: list[Part]


@dataclass
class LoadRound:
    """What one rank does in one round. Two ranks list what travels between them in one order.

    Attributes:
        segments: What it reads, in the order of the files.
        places: Where each lies in its window; -1 if nobody sees it there.
        cuts: What it needs of that itself, and what it sends.
        own: The numbers of the cuts it needs itself.
        outgoing: For each rank on another host, the numbers of the cuts it is sent.
        incoming: For each rank on another host, the (tensor, box) that it sends.
        seen: What it takes from the windows of others.
    """

    segments: list[Segment] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    outgoing: dict[int, list[int]] = field(default_factory=dict)
    incoming: dict[int, list[tuple[str, Box]]] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)


def plan_load(
    wanted: Sequence[Holding],
    stored: Mapping[str, StoredAs],
    rank: int,
    *,
    hosts: Sequence[int],
    limit: int = BUCKET_BYTES,
) -> list[LoadRound]:
    """The work of ``rank``, in as many rounds on every rank.

    What lies in a window in one round may be taken until the end of the next.

    Args:
        wanted: What the ranks want together; every tensor is stored, in the same shape.
        stored: Where all tensors lie.
        rank: This rank.
        hosts: For each rank the number of its host; ranks of one host see each other's windows.
        limit: Bytes that a rank holds in a round for others or from others.
    """
    needs, overlaps = find_needs(wanted, stored)
    wants = _wants(needs, wanted, np.asarray(hosts, dtype=np.int64))
    rounds, number = _rounds(wants, len(hosts), limit)
    plan = [LoadRound() for _ in range(rounds)]
    places = _places(wants, number, len(hosts))
    _note(plan, number, places, wants, needs, overlaps, wanted, stored, rank)
    return plan


class _Wants(NamedTuple):
    """Who needs what of which block.

    Attributes:
        needs: Number of the part that is needed; one entry for each rank that needs it.
        ranks: The rank.
        is_sent: Whether it is on another host than the reader.
        segments: Number of the segment; entries are sorted by it.
        blocks: For each segment, the number of its block among those that are read; ascending.
        passing: For each segment, bytes that the reader holds for others, aligned.
        in_window: For each segment, whether another rank on the reader's host needs of it.
        readers: For each block, the rank that reads it.
        block_ranks: The ranks that need something of a block, block after block ...
        block_bytes: ... and how much a message brings or takes.
        starts: Where a block begins in those two; one entry more at the end.
    """

    needs: np.ndarray
    ranks: np.ndarray
    is_sent: np.ndarray
    segments: np.ndarray
    blocks: np.ndarray
    passing: np.ndarray
    in_window: np.ndarray
    readers: np.ndarray
    block_ranks: np.ndarray
    block_bytes: np.ndarray
    starts: np.ndarray


def _wants(needs: Needs, wanted: Sequence[Holding], hosts: np.ndarray) -> _Wants:
    num_ranks = len(hosts)
    # All holders of all cells, one after the other; ``first`` is where those of a cell begin.
    copies = np.concatenate([np.empty(0, int), *(one.layout.copies for one in wanted)])
    holders = np.concatenate([np.empty(0, int), *(one.layout.holders for one in wanted)])
    first = np.cumsum(copies) - copies
    cells = np.cumsum([0] + [len(one.layout.cells) for one in wanted])[needs.tensors] + needs.cells
    counts = copies[cells]
    which = np.repeat(np.arange(len(cells)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    ranks = holders[first[cells[which]] + within]
    blocks = _numbered(needs.blocks)[which]
    segments = _numbered(needs.blocks, needs.tensors, needs.chunks, needs.starts)[which]
    pairs = blocks * num_ranks + ranks
    by_pair = np.argsort(pairs, kind="stable")
    starts = np.flatnonzero(np.diff(pairs[by_pair], prepend=-1))
    nbytes = np.add.reduceat(needs.nbytes[which][by_pair], starts) if len(starts) else pairs
    block_of, block_ranks = np.divmod(pairs[by_pair][starts], num_ranks)
    starts = np.searchsorted(block_of, np.arange(blocks[-1] + 2 if len(blocks) else 1))
    readers = _readers(block_of, block_ranks, nbytes, starts)
    begins = np.flatnonzero(np.diff(segments, prepend=-1))
    foreign, is_sent = ranks != readers[blocks], hosts[ranks] != hosts[readers[blocks]]
    lengths = needs.lengths[which[begins]]
    return _Wants(
        which,
        ranks,
        is_sent,
        segments,
        blocks[begins],
        _any(foreign, segments) * (lengths + -lengths % _ALIGNMENT),
        _any(foreign & ~is_sent, segments),
        readers,
        block_ranks,
        nbytes * (hosts[block_ranks] != hosts[readers[block_of]]),
        starts,
    )


def _numbered(*columns: np.ndarray) -> np.ndarray:
    """Rows whose equals stand next to each other, numbered 0, 1, 2 ..."""
    is_new = np.zeros(len(columns[0]), dtype=bool)
    for column in columns:
        is_new[1:] |= column[1:] != column[:-1]
    return np.cumsum(is_new)


def _any(flags: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """For each segment, whether one of its entries is flagged."""
    return np.bincount(segments, flags) > 0


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
    passing = np.bincount(wants.blocks, wants.passing, len(readers)).astype(np.int64)
    order = np.argsort(readers, kind="stable")
    first = np.searchsorted(readers[order], np.arange(num_ranks))
    turn = np.empty(len(readers), dtype=np.int64)
    turn[order] = np.arange(len(readers)) - first[readers[order]]
    for block in np.lexsort((readers, turn)):
        span = slice(wants.starts[block], wants.starts[block + 1])
        reader, ranks = readers[block], wants.block_ranks[span]
        nbytes = wants.block_bytes[span].copy()
        nbytes[ranks == reader] = passing[block] + nbytes.sum()
        reached[reader] = number[block] = rounds.place(ranks, nbytes, first=int(reached[reader]))
    return len(rounds), number


def _places(wants: _Wants, number: np.ndarray, num_ranks: int) -> np.ndarray:
    """Where each segment lies in its reader's window: one half in even rounds, one in odd ones."""
    readers, turns = wants.readers[wants.blocks], number[wants.blocks]
    order = np.lexsort((turns, readers))
    by_reader, by_turn = readers[order], turns[order]
    lengths = (wants.passing * wants.in_window)[order]
    starts = np.cumsum(lengths) - lengths
    which = _numbered(by_reader, by_turn)
    starts -= starts[np.searchsorted(which, which)]
    halves = np.zeros(num_ranks, dtype=np.int64)
    np.maximum.at(halves, by_reader, starts + lengths)
    places = np.empty(len(order), dtype=np.int64)
    places[order] = starts + by_turn % 2 * halves[by_reader]
    return np.where(wants.in_window, places, -1)


def _note(
    plan: list[LoadRound],
    number: np.ndarray,
    places: np.ndarray,
    wants: _Wants,
    needs: Needs,
    overlaps: Sequence[Overlaps],
    wanted: Sequence[Holding],
    stored: Mapping[str, StoredAs],
    rank: int,
) -> None:
    """Write down what concerns ``rank``, block after block."""
    blocks = wants.blocks[wants.segments]
    mine = np.flatnonzero((wants.readers[blocks] == rank) | (wants.ranks == rank))
    columns = (
        wants.needs[mine],
        number[blocks[mine]],
        wants.readers[blocks[mine]],
        places[wants.segments[mine]],
        wants.ranks[mine],
        wants.is_sent[mine],
    )
    entries = zip(*(column.tolist() for column in columns), strict=True)
    for (need, turn, reader, place), holders in groupby(entries, key=itemgetter(0, 1, 2, 3)):
        tensor, work = int(needs.tensors[need]), plan[turn]
        name = wanted[tensor].name
        chunk = stored[name].chunks[needs.chunks[need]]
        segment = Segment(name, chunk, int(needs.starts[need]), int(needs.stops[need]))
        (overlap,) = as_boxes(overlaps[tensor].boxes[needs.boxes[need]][None])
        if reader == rank:
            takers = [holder for *_, holder, is_sent in holders if holder == rank or is_sent]
            _note_read(work, segment, place, overlap, takers, rank)
            continue
        ((*_, is_sent),) = holders
        parts = _parts(segment, overlap)
        if is_sent:
            work.incoming.setdefault(reader, []).extend((name, part.box) for part in parts)
        else:
            work.seen.append(Seen(reader, place, segment, parts))


def _note_read(
    work: LoadRound, segment: Segment, place: int, overlap: Box, takers: list[int], rank: int
) -> None:
    """Write down that ``rank`` reads a segment, of which it and others take an overlap."""
    if not work.segments or work.segments[-1] != segment:
        work.segments.append(segment)
        work.places.append(place)
    if takers:
        parts = _parts(segment, overlap)
        cuts = range(len(work.cuts), len(work.cuts) + len(parts))
        work.cuts += [Cut(len(work.segments) - 1, part) for part in parts]
        for taker in takers:
            own = work.own if taker == rank else work.outgoing.setdefault(taker, [])
            own.extend(cuts)


def _parts(segment: Segment, overlap: Box) -> list[Part]:
    """What an overlap has in a segment."""
    found = []
    for run in flat_boxes(segment.start, segment.stop, segment.chunk.shape):
        both = intersection(run, overlap)
        if both is not None:
            found.append(Part(run, moved(both, segment.chunk.box)))
    return found
