"""Some heads of chunks, and what forward and backward both compute of them.

Dimensions: c chunks of b rows, n of them at a time, q tokens of a chunk, h heads in g groups of
j, P features of a head, N features of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.ssd.chunks import Chunks, Inputs
from megablocks_core.layers.ssm.functions.ssd.plan import Lane, Region
from megablocks_core.layers.ssm.functions.ssd.rooms import Rooms, Work, flat


class Piece(NamedTuple):
    """A few chunks of some heads, all views.

    Attributes:
        some: Which chunks of the region.
        x: [n b g q j P].
        moving, leaving: The factors of x in ``Work.moved`` and ``Work.left`` [n b g q j 1].
        low, enter, skip: Further factors of tokens [n b g q j 1].
        sums: Logarithms of decays [n b h q].
        passing: How much of a state passes a chunk [n b h 1 1].
        B, C: [n b g q N].
        meets: [n b g 1 q q].
    """

    some: slice
    x: Tensor
    moving: Tensor
    leaving: Tensor
    low: Tensor
    enter: Tensor
    skip: Tensor
    sums: Tensor
    passing: Tensor
    B: Tensor
    C: Tensor
    meets: Tensor


class Heads:
    """Some heads of chunks.

    Attributes:
        pieces: A few chunks at a time.
        works: Rooms for any number of chunks.
        shape: [b h P N], that of a state.
        entries: Added to states [c b h P N], or ``None``.
        D: Of each feature [g 1 j P], or ``None``.
    """

    def __init__(
        self,
        inputs: Inputs,
        chunks: Chunks,
        region: Region,
        lane: Lane,
        rooms: Rooms,
        at_a_time: int,
    ) -> None:
        self.chunks, self.region, self.lane, self.rooms = chunks, region, lane, rooms
        decays, by_token = chunks.decays, chunks.by_token
        tensors = (
            lane.of(chunks.x),
            lane.of(by_token(chunks.dt * decays.unlow)),
            lane.of(by_token(chunks.dt * decays.leave)),
            *(lane.of(by_token(each)) for each in (decays.low, decays.enter, chunks.skip)),
            decays.sums[:, :, lane.heads],
            decays.passing[:, :, lane.heads, None, None],
            chunks.B[:, :, lane.groups],
            chunks.C[:, :, lane.groups],
            chunks.meets[:, :, lane.groups, None],
        )
        self.pieces = self.cut(*tensors, at_a_time=at_a_time)
        _, b, g, q, j, P = tensors[0].shape
        N = chunks.B.shape[-1]
        self.shape = (b, g * j, P, N)
        self.works: Callable[[int], Work] = cache(lambda n: Work(rooms, (n, b, g, q, j, P, N)))
        self.entries = self.D = None
        if inputs.entries is not None:
            those = slice(region.chunk, region.chunk + region.number)
            self.entries = inputs.entries[those, region.rows, lane.heads]
        if inputs.D is not None and inputs.D.dim() == 2:
            groups = inputs.D.to(rooms.dtype).unflatten(0, (chunks.groups, -1))
            self.D = groups[lane.groups, None, lane.inside]

    def cut(self, *tensors: Tensor, at_a_time: int) -> list[Piece]:
        """The chunks, a few at a time."""
        starts = range(0, self.region.number, at_a_time)
        somes = [slice(start, min(start + at_a_time, starts.stop)) for start in starts]
        parts = (x.split(at_a_time) for x in tensors)
        return [Piece(*each) for each in zip(somes, *parts, strict=True)]

    def pass_on(self, piece: Piece, work: Work, x: Tensor, states: Tensor) -> None:
        """Put in ``work`` what tokens leave, and in ``states`` [n+1 b h P N] all but the first."""
        torch.mul(x, piece.leaving, out=work.left)
        torch.bmm(work.left_.mT, flat(piece.B), out=work.added_)
        if self.entries is not None:
            work.added.add_(self.entries[piece.some])
        for index, passing in enumerate(piece.passing.unbind()):
            before, behind = states[index], states[index + 1]
            torch.addcmul(work.added[index], before, passing, out=behind)

    def read(self, piece: Piece, work: Work, states: Tensor) -> None:
        """Put in ``work`` what is read from the states before the chunks, not yet decayed."""
        torch.bmm(flat(piece.C), work.by_group(states[:-1]).mT, out=work.read_)
