"""The scan forward, a few chunks of a few heads at a time.

Dimensions: c chunks of b rows, n of them at a time, q tokens of a chunk, h heads in g groups of
j, P features of a head, N features of a state; k states that are kept of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.ssd.chunks import Chunks, Inputs
from megablocks_core.layers.ssm.functions.ssd.decays import between
from megablocks_core.layers.ssm.functions.ssd.heads import Heads, Piece
from megablocks_core.layers.ssm.functions.ssd.plan import (
    EVERY,
    count_kept,
    plan_of,
    regions,
)
from megablocks_core.layers.ssm.functions.ssd.rooms import Rooms, Work, widened
from megablocks_core.layers.ssm.functions.steps import wide


class Scanned(NamedTuple):
    """What the scan gives.

    Attributes:
        y: [B L H P].
        final: The state behind the last token [B H P N].
        states: Those before some chunks, or before each if asked [k B H P N].
    """

    y: Tensor
    final: Tensor
    states: Tensor


def empty_results(inputs: Inputs, chunk_size: int, every_chunk: bool) -> Scanned:
    """Results with anything in them."""
    x, kind = inputs.x, wide(inputs.x)
    batch, length, heads, features = x.shape
    state = (batch, heads, features, inputs.B.shape[-1])
    count = count_kept(length, chunk_size, 1 if every_chunk else EVERY)
    return Scanned(
        x.new_empty(x.shape),
        x.new_empty(state, dtype=kind),
        x.new_empty((count, *state), dtype=kind),
    )


def scan(inputs: Inputs, carry: Tensor | None, chunk_size: int, every_chunk: bool) -> Scanned:
    """Run it from ``carry`` [B H P N] on, the state before the first token, or from zeros."""
    results = empty_results(inputs, chunk_size, every_chunk)
    final = results.final
    final.zero_() if carry is None else final.copy_(carry)
    rooms, every = Rooms(inputs.x, final.dtype), 1 if every_chunk else EVERY
    plan = plan_of(inputs.x, inputs.B, chunk_size)
    for parts in regions(inputs.x, chunk_size, every, plan.rows):
        for region in parts:
            chunks = Chunks(inputs, region, rooms.dtype)
            for lane in plan.lanes:
                _Forward(inputs, chunks, region, lane, rooms, plan.chunks).run(results, every)
    return results


class _Forward(Heads):
    """Forward of some heads."""

    def run(self, results: Scanned, every: int) -> None:
        """Write y, and the states that are kept; go on from the last state."""
        region, lane = self.region, self.lane
        y = lane.of(self.chunks.grouped(region.of(results.y)))
        kept = results.states[region.kept :, region.rows, lane.heads]
        final = results.final[region.rows, lane.heads]
        states = self.rooms.of("states", EVERY + 1, *self.shape)
        states[0].copy_(final)
        for piece in self.pieces:
            first, number = piece.some.start, len(piece.x)
            work, x = self.works(number), widened(piece.x, self.rooms, "x")
            self.pass_on(piece, work, x, states)
            for index in range(-first % every, number, every):
                kept[(first + index) // every].copy_(states[index])
            self._write(piece, y[piece.some], work, x, states[: number + 1])
            states[0].copy_(states[number])
        final.copy_(states[0])

    def _write(self, piece: Piece, y: Tensor, work: Work, x: Tensor, states: Tensor) -> None:
        torch.mul(x, piece.moving, out=work.moved_by_token)
        between(piece.sums, work.matrix)
        work.matrix_by_group.mul_(piece.meets)
        torch.bmm(work.matrix_, work.moved_, out=work.met_)
        self.read(piece, work, states)
        narrow = y.dtype != self.rooms.dtype
        total = self.rooms.of("y", *y.shape) if narrow else y
        torch.mul(work.met_by_token, piece.low, out=total)
        total.addcmul_(work.read, piece.enter)
        total.addcmul_(x, piece.skip)
        if self.D is not None:
            total.addcmul_(x, self.D)
        if narrow:
            y.copy_(total)
