"""Backward of some heads, a few chunks at a time.

Dimensions: c chunks of b rows, n of them at a time, q tokens of a chunk, h heads in g groups of
j, P features of a head, N features of a state; k states that forward kept of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.ssd.decays import between
from megablocks_core.layers.ssm.functions.ssd.gradients import Found, Gradients
from megablocks_core.layers.ssm.functions.ssd.heads import Heads, Piece
from megablocks_core.layers.ssm.functions.ssd.plan import EVERY
from megablocks_core.layers.ssm.functions.ssd.rooms import Work, flat, widened


class _Slopes(NamedTuple):
    """What backward needs of a piece's tokens besides, all views.

    Attributes:
        dy: Gradient in y [n b g q j P].
        dx: Where that in x is written.
        dt, unlow, leave: Factors of tokens [n b g q j 1].
        own, read, left, input: Where those of ``Found`` are written [n b g q j].
    """

    dy: Tensor
    dx: Tensor
    dt: Tensor
    unlow: Tensor
    leave: Tensor
    own: Tensor
    read: Tensor
    left: Tensor
    input: Tensor


class BackwardHeads(Heads):
    """Backward of some heads; what it finds of each token goes to ``Found``."""

    def run(
        self,
        found: Found,
        gradients: Gradients,
        states: Tensor,
        dy: Tensor,
        dstates: Tensor | None,
        every: int,
    ) -> None:
        """Go through the chunks from the last one on; the gradient in the carry moves along.

        Args:
            found: Filled in.
            gradients: Those in x and entries are written.
            states: Kept by forward [k B H P N].
            dy: Gradient in y [B L H P].
            dstates: In the states before every chunk [chunks B H P N].
            every: Before every how many chunks the state is kept.
        """
        region, lane, chunks = self.region, self.lane, self.chunks
        kept = states[region.kept :, region.rows, lane.heads]
        those = slice(region.chunk, region.chunk + region.number)
        self.found = found
        self.dcarry = gradients.carry[region.rows, lane.heads]
        self.dstates = None if dstates is None else dstates[those, region.rows, lane.heads]
        self.dentries = None
        if self.entries is not None:
            self.dentries = gradients.entries[those, region.rows, lane.heads]
        q = region.length
        self.ones = kept.new_ones(self.shape[2])
        self.later = kept.new_ones(q, q).triu(1)  # j before t
        self.not_earlier = kept.new_ones(q, q).tril()  # i from t on
        tokens = (chunks.grouped(region.of(x)) for x in (dy, gradients.x))
        factors = (
            chunks.by_token(x) for x in (chunks.dt, chunks.decays.unlow, chunks.decays.leave)
        )
        at_a_time = len(self.pieces[0].x)
        sums = (found.own, found.read, found.left, found.input)
        cut = [lane.of(x).split(at_a_time) for x in (*tokens, *factors, *sums)]
        pieces = list(zip(self.pieces, map(_Slopes, *cut), strict=True))
        many = max(1, every // at_a_time)
        blocks = [pieces[at : at + many] for at in range(0, len(pieces), many)]
        for block, first in reversed(list(zip(blocks, kept, strict=False))):
            self._block(block, first)

    def _block(self, block: list[tuple[Piece, _Slopes]], first: Tensor) -> None:
        """Compute states from the one before the block, then go back through its chunks."""
        states = self.rooms.of("states", EVERY + 1, *self.shape)
        states[0].copy_(first)
        start = block[0][0].some.start
        for piece, _ in block:
            work, x = self.works(len(piece.x)), widened(piece.x, self.rooms, "x")
            self.pass_on(piece, work, x, states[piece.some.start - start :])
        for piece, slopes in reversed(block):
            those = slice(piece.some.start - start, piece.some.stop - start + 1)
            self._piece(piece, slopes, states[those])

    def _piece(self, piece: Piece, slopes: _Slopes, states: Tensor) -> None:
        work, rooms = self.works(len(piece.x)), self.rooms
        x, dy = widened(piece.x, rooms, "x"), widened(slopes.dy, rooms, "dy")
        torch.mul(x, piece.leaving, out=work.left)
        entered, entered_ = work.pair("entered", work.left.shape, *work.left_.shape[1:])
        torch.mul(dy, piece.enter, out=entered)
        dbehind = self._states(piece, work, states, entered_)
        self._pairs(piece, work, x, dy)
        self._outside(piece, slopes, work, states, entered_, work.by_group(dbehind))
        self._tokens(piece, slopes, work, x, dy)

    def _states(self, piece: Piece, work: Work, states: Tensor, entered_: Tensor) -> Tensor:
        """The gradients in the states behind each chunk [n b h P N]; moves the carry's on."""
        torch.bmm(entered_.mT, flat(piece.C), out=work.added_)
        if self.dstates is not None:
            work.added.add_(self.dstates[piece.some])
        dbehind = self.rooms.of("dbehind", *work.added.shape)
        dbehind[-1].copy_(self.dcarry)
        for index, passing in reversed(list(enumerate(piece.passing.unbind()))):
            before = dbehind[index - 1] if index else self.dcarry
            torch.addcmul(work.added[index], dbehind[index], passing, out=before)
        passed = torch.mul(dbehind, states[:-1], out=work.added).sum((-1, -2))
        passed *= piece.passing[..., 0, 0]
        self.found.passing[piece.some, :, self.lane.heads] = passed
        if self.dentries is not None:
            self.dentries[piece.some].copy_(dbehind)
        return dbehind

    def _pairs(self, piece: Piece, work: Work, x: Tensor, dy: Tensor) -> None:
        """Tokens that meet in a chunk; the gradient in ``moved`` takes its place."""
        n, b, g, q, j, P, _ = work.shape
        torch.mul(x, piece.moving, out=work.moved_by_token)
        torch.mul(dy, piece.low, out=work.met_by_token)
        between(piece.sums, work.matrix)
        dmatrix, dmatrix_ = work.pair("dmatrix", work.matrix.shape, q, q)
        torch.bmm(work.met_, work.moved_.mT, out=dmatrix_)
        dmatrix.mul_(work.matrix)
        by_group = dmatrix.view(n, b, g, j, q, q)
        self.found.meets[piece.some, :, self.lane.groups] += by_group.sum(3)
        work.matrix_by_group.mul_(piece.meets)
        torch.bmm(work.matrix_.mT, work.met_, out=work.moved_)
        # Of each decay t: the sum over all i from t on, and j before t.
        by_group.mul_(piece.meets)
        crossing = torch.mm(dmatrix.view(-1, q), self.later, out=work.matrix.view(-1, q))
        crossing = crossing.view(n, b, g * j, q, q).mul_(self.not_earlier)
        torch.sum(crossing, dim=3, out=self.found.crossing[piece.some, :, self.lane.heads])

    def _outside(
        self,
        piece: Piece,
        slopes: _Slopes,
        work: Work,
        states: Tensor,
        entered_: Tensor,
        dbehind_: Tensor,
    ) -> None:
        """What is read from the states before chunks, and left in those behind."""
        groups = self.lane.groups
        dC, dB = self.found.C[piece.some, :, groups], self.found.B[piece.some, :, groups]
        flat(dC).baddbmm_(entered_, work.by_group(states[:-1]))
        flat(dB).baddbmm_(work.left_, dbehind_)
        self.read(piece, work, states)
        self._sum(work.read.mul_(entered_.view_as(work.read)), slopes.read)
        torch.bmm(flat(piece.B), dbehind_.mT, out=work.read_)

    def _tokens(self, piece: Piece, slopes: _Slopes, work: Work, x: Tensor, dy: Tensor) -> None:
        """The gradient in x, and its inner products."""
        product = work.met.view(x.shape)
        self._sum(torch.mul(dy, x, out=product), slopes.own)
        if self.D is not None:
            each = self.found.D[self.lane.groups, self.lane.inside]
            each += product.sum((0, 1, 3))
        dinput = work.read.mul_(slopes.leave)
        self._sum(torch.mul(dinput, x, out=product), slopes.left)
        dinput.addcmul_(work.moved_by_token, slopes.unlow)
        self._sum(torch.mul(dinput, x, out=product), slopes.input)
        narrow = slopes.dx.dtype != self.rooms.dtype
        dx = self.rooms.of("y", *slopes.dx.shape) if narrow else slopes.dx
        torch.mul(dinput, slopes.dt, out=dx)
        dx.addcmul_(dy, piece.skip)
        if self.D is not None:
            dx.addcmul_(dy, self.D)
        if narrow:
            slopes.dx.copy_(dx)

    def _sum(self, product: Tensor, out: Tensor) -> None:
        """Put sums over features [n b g q j P] in ``out``."""
        sums = torch.mv(product.view(-1, product.shape[-1]), self.ones)
        out.copy_(sums.view(out.shape))
