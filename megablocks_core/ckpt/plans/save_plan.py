"""Who writes what, and who sends what to whom, in which round. Pure arithmetic.

A tensor that is brought together has one writer among the ranks that hold a part of it. Of the
others each cell is written by one of its holders, as it lies. Both go to the rank that has least
to write so far, so that bytes are balanced. Every rank works out the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import NamedTuple

import numpy as np

from megablocks_core.ckpt.plans.boxes import as_array, as_boxes, sizes, split
from megablocks_core.ckpt.plans.outlines import Holding
from megablocks_core.ckpt.plans.rounds import BUCKET_BYTES, Rounds
from megablocks_core.groups.cuts import Box


class Transfer(NamedTuple):
    """A box of a whole tensor that travels between this rank and ``peer``."""

    name: str
    box: Box
    peer: int


class Piece(NamedTuple):
    """A box that this rank writes as it lies in its memory."""

    tensor: Holding
    box: Box


class Whole(NamedTuple):
    """A tensor that this rank writes, and which of its cells it holds itself."""

    tensor: Holding
    own: list[Box]


@dataclass
class Round:
    """What one rank does in one round. Two ranks list what travels between them in one order."""

    outgoing: list[Transfer] = field(default_factory=list)
    incoming: list[Transfer] = field(default_factory=list)
    complete: list[Whole] = field(default_factory=list)


@dataclass
class SavePlan:
    """One rank's share of the work.

    Attributes:
        wholes: The tensors it brings together, in the order of their completion.
        rounds: As many on every rank.
        pieces: What it writes without exchange.
        homes: For each tensor that is brought together, the rank that writes it.
    """

    wholes: list[Whole]
    rounds: list[Round]
    pieces: list[Piece]
    homes: dict[str, int]


def plan_save(
    tensors: Sequence[Holding], rank: int, *, num_ranks: int, limit: int = BUCKET_BYTES
) -> SavePlan:
    """The work of ``rank``, widest dtype first.

    Raises:
        ValueError: Elements of a tensor are held by no rank.
    """
    _check_covered(tensors)
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    writers = assign(tensors, num_ranks)
    plan = SavePlan([], [], [], {})
    for tensor, ranks in zip(tensors, writers, strict=True):
        if tensor.whole:
            plan.homes[tensor.name] = int(ranks[0])
        else:
            own = np.flatnonzero(ranks == rank)
            plan.pieces += [Piece(tensor, box) for box in as_boxes(tensor.layout.cells[own])]
    _exchange(plan, tensors, writers, rank, num_ranks, limit)
    return plan


def assign(tensors: Sequence[Holding], num_ranks: int) -> list[np.ndarray]:
    """For each tensor the rank that writes it or, if it is not brought together, each cell."""
    load = np.zeros(num_ranks, dtype=np.int64)
    writers: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(tensors)
    open_: list[int] = []
    for index, tensor in enumerate(tensors):
        layout = tensor.layout
        if tensor.whole or layout.copies.max(initial=1) > 1:
            open_.append(index)
        else:  # no choice
            writers[index] = layout.holders
            np.add.at(load, layout.holders, layout.sizes * tensor.dtype.itemsize)
    for index in sorted(open_, key=lambda index: -tensors[index].nbytes):
        tensor, layout = tensors[index], tensors[index].layout
        if tensor.whole:
            writers[index] = _least(load, layout.ranks[None])
            load[writers[index]] += tensor.nbytes
        else:
            writers[index] = _least(load, layout.choices)
            np.add.at(load, writers[index], layout.sizes * tensor.dtype.itemsize)
    return writers


def _least(load: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """For each row of ``choices``, the rank with the least load; the first of equals."""
    return choices[np.arange(len(choices)), load[choices].argmin(axis=1)]


def _exchange(
    plan: SavePlan,
    tensors: Sequence[Holding],
    writers: Sequence[np.ndarray],
    rank: int,
    num_ranks: int,
    limit: int,
) -> None:
    """Plan the rounds in which the writers bring their tensors together."""
    rounds = Rounds(num_ranks, limit)
    sent = np.zeros(num_ranks, dtype=np.int64)
    reached = [0] * num_ranks  # a writer's tensors become complete in order
    for tensor, writer in _in_turn(tensors, writers):
        layout, itemsize = tensor.layout, tensor.dtype.itemsize
        far = np.flatnonzero(~layout.held_by(writer))
        sources = _least(sent, layout.choices[far])
        np.add.at(sent, sources, layout.sizes[far] * itemsize)
        for cells, peers in _portions(tensor, layout.cells[far], sources, limit):
            number = _place(rounds, tensor, cells, peers, writer, reached[writer], limit)
            reached[writer] = number
            if rank == writer:
                arriving = zip(as_boxes(cells), peers.tolist(), strict=True)
                _round(plan, number).incoming += [
                    Transfer(tensor.name, box, peer) for box, peer in arriving
                ]
            elif (mine := peers == rank).any():
                _round(plan, number).outgoing += [
                    Transfer(tensor.name, box, writer) for box in as_boxes(cells[mine])
                ]
        if rank == writer:
            own = as_boxes(np.delete(layout.cells, far, axis=0))
            plan.wholes.append(Whole(tensor, own))
            _round(plan, reached[writer]).complete.append(plan.wholes[-1])
    while len(plan.rounds) < max(len(rounds), max(reached) + 1):
        plan.rounds.append(Round())


def _in_turn(
    tensors: Sequence[Holding], writers: Sequence[np.ndarray]
) -> Iterator[tuple[Holding, int]]:
    """The tensors that are brought together, the first of every writer first."""
    turns: dict[int, list[Holding]] = {}
    for tensor, ranks in zip(tensors, writers, strict=True):
        if tensor.whole:
            turns.setdefault(int(ranks[0]), []).append(tensor)
    for turn in zip_longest(*(turns[writer] for writer in sorted(turns))):
        for writer, tensor in zip(sorted(turns), turn, strict=True):
            if tensor is not None:
                yield tensor, writer


def _portions(
    tensor: Holding, cells: np.ndarray, peers: np.ndarray, limit: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What one round brings, as boxes and who sends them: all, or parts of a large tensor."""
    if tensor.nbytes <= limit:
        if len(cells):
            yield cells, peers
        return
    most = max(limit // tensor.dtype.itemsize, 1)
    for cell, peer in zip(as_boxes(cells), peers, strict=True):
        for box in split(cell, most):
            yield as_array([box], len(box)), peer[None]


def _place(
    rounds: Rounds,
    tensor: Holding,
    cells: np.ndarray,
    peers: np.ndarray,
    writer: int,
    first: int,
    limit: int,
) -> int:
    """The round of one portion. The writer needs room for messages and a tensor of a bucket."""
    ranks, which = np.unique(peers, return_inverse=True)
    nbytes = np.zeros(len(ranks), dtype=np.int64)
    np.add.at(nbytes, which, sizes(cells) * tensor.dtype.itemsize)
    needed = nbytes.sum() + (tensor.nbytes if tensor.nbytes <= limit else 0)
    return rounds.place(np.append(ranks, writer), np.append(nbytes, needed), first=first)


def _round(plan: SavePlan, number: int) -> Round:
    while len(plan.rounds) <= number:
        plan.rounds.append(Round())
    return plan.rounds[number]


def _check_covered(tensors: Sequence[Holding]) -> None:
    for tensor in tensors:
        if not tensor.layout.covered:
            raise ValueError(
                f"{tensor.name}: the group holds {tensor.layout.sizes.sum()} of the "
                f"{prod(tensor.shape)} elements of shape {tensor.shape}"
            )
