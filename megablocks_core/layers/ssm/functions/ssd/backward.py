"""The scan backward: a span of chunks is computed again from the state before it.

The sum of logarithms cs_i up to token i is in every term of y_i, and so is -cs_j in every term
that holds x_j: their gradients are inner products of what is there with its gradient, without a
pass over pairs of tokens.

Dimensions: n chunks of b rows, q tokens of a chunk, H heads in G groups of J, P features of a
head, N features of a state; s spans of a row, or its chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.ssd.chunks import Chunks, Inputs, flat
from megablocks_core.layers.ssm.functions.ssd.forward import entries_of
from megablocks_core.layers.ssm.functions.ssd.rooms import Rooms
from megablocks_core.layers.ssm.functions.ssd.spans import Span, spans_of_rows
from megablocks_core.layers.ssm.functions.steps import wide


class Gradients(NamedTuple):
    """Those of ``Inputs`` and of the carry; empty where there is no such input."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    entries: Tensor
    carry: Tensor


def empty_gradients(inputs: Inputs) -> Gradients:
    """Gradients with anything in them."""
    x, kind = inputs.x, wide(inputs.x)
    state = (x.shape[0], x.shape[2], x.shape[3], inputs.B.shape[-1])
    nothing = x.new_empty(0)
    return Gradients(
        *(part.new_empty(part.shape) for part in inputs[:5]),
        D=nothing if inputs.D is None else inputs.D.new_empty(inputs.D.shape),
        entries=nothing
        if inputs.entries is None
        else inputs.entries.new_empty(inputs.entries.shape),
        carry=x.new_empty(state, dtype=kind),
    )


def gradients_of(
    inputs: Inputs,
    states: Tensor,
    dy: Tensor,
    dfinal: Tensor,
    dstates: Tensor | None,
    chunk_size: int,
) -> Gradients:
    """Gradients in every input.

    Args:
        inputs: Those of forward.
        states: Those that forward gave.
        dy: Gradient in y [B L H P].
        dfinal: In the last state [B H P N].
        dstates: In the states before every chunk, if forward gave all [chunks B H P N].
        chunk_size: That of forward.
    """
    gradients = empty_gradients(inputs)
    carry = gradients.carry.copy_(dfinal)
    backward = _Backward(inputs, gradients, chunk_size)
    for spans in spans_of_rows(inputs.x, chunk_size):
        for span in reversed(spans):
            chunks = slice(span.chunk, span.chunk + span.number)
            every = dstates is not None
            before = states[span.chunk if every else span.index, span.rows]
            further = dstates[chunks, span.rows] if dstates is not None else None
            carry[span.rows] = backward.span(span, before, span.of(dy), carry[span.rows], further)
    gradients.A.copy_(backward.dA)
    if inputs.D is not None:
        gradients.D.copy_(backward.dD)
    return gradients


class _Backward:
    """Backward of spans one after another; what all tokens share is added up in float64."""

    def __init__(self, inputs: Inputs, gradients: Gradients, chunk_size: int) -> None:
        self.inputs, self.gradients = inputs, gradients
        kind = wide(inputs.x)
        self.rooms = Rooms(inputs.x, kind)
        self.A = inputs.A.to(kind)
        self.D = None if inputs.D is None else inputs.D.to(kind)
        self.dA = torch.zeros_like(inputs.A, dtype=torch.float64)
        self.dD = torch.zeros_like(inputs.A if inputs.D is None else inputs.D, dtype=torch.float64)
        self.ones = torch.ones(inputs.x.shape[-1], dtype=kind, device=inputs.x.device)

    def span(
        self,
        span: Span,
        before: Tensor,
        dy_nbqHP: Tensor,
        dafter: Tensor,
        dstates: Tensor | None,
    ) -> Tensor:
        """Write a span's gradients; give that in the state before it [b H P N]."""
        rooms, inputs = self.rooms, self.inputs
        chunks = Chunks(inputs, span, rooms)
        entries = entries_of(inputs, span)
        states = chunks.states(before, entries, rooms)
        dy = chunks.grouped(rooms.wide("dy", dy_nbqHP))
        entered = rooms.of("entered", *chunks.left.shape)
        torch.mul(dy, chunks.by_token(chunks.decays.enter), out=entered)

        dbehind, dbefore = self._state_gradients(chunks, entered, dafter, dstates)
        if entries is not None:
            number = slice(span.chunk, span.chunk + span.number)
            self.gradients.entries[number, span.rows] = dbehind
        # Each state behind a chunk, but for what is added from outside, decays with the chunk.
        whole_nbH = _inner(dbehind, states[1:], rooms)
        if entries is not None:
            whole_nbH = whole_nbH - _inner(dbehind, entries, rooms)

        own_nbHq = self._own(chunks, dy)
        dB, dC, row_nbHq = self._pairs(chunks, dy, own_nbHq)
        row_nbHq = row_nbHq + self._read(chunks, entered, states, dC)
        column_nbHq = self._inputs(span, chunks, dy, dbehind, dB)
        self._steps(span, chunks, own_nbHq, row_nbHq, column_nbHq, whole_nbH)
        span.of(self.gradients.B).transpose(2, 3).copy_(dB)
        span.of(self.gradients.C).transpose(2, 3).copy_(dC)
        return dbefore

    def _state_gradients(
        self, chunks: Chunks, entered: Tensor, dafter: Tensor, dstates: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradients in the states behind each chunk [n b H P N], and before the first."""
        n, b, G, q, J, P, N = chunks.shape
        passing = chunks.decays.passing[..., None, None]
        dread = self.rooms.of("added", n, b, G * J, P, N)
        torch.bmm(flat(entered, 2).mT, flat(chunks.C), out=dread.view(-1, J * P, N))
        if dstates is not None:
            dread.add_(dstates)
        dbehind = self.rooms.of("dbehind", n, b, G * J, P, N)
        dbehind[-1] = dafter
        for chunk in range(n - 1, 0, -1):
            torch.addcmul(dread[chunk], dbehind[chunk], passing[chunk], out=dbehind[chunk - 1])
        return dbehind, torch.addcmul(dread[0], dbehind[0], passing[0])

    def _own(self, chunks: Chunks, dy: Tensor) -> Tensor:
        """The inner product of dy and x of each token [n b H q]."""
        product = self.rooms.of("product", *dy.shape)
        torch.mul(dy, chunks.x, out=product)
        own_nbHq = self._sum(product)
        if self.D is not None and self.D.dim() == 2:
            self.dD += product.sum((0, 1, 3)).view(self.D.shape)
        elif self.D is not None:
            self.dD += own_nbHq.sum((0, 1, 3))
        return own_nbHq

    def _pairs(self, chunks: Chunks, dy: Tensor, own_nbHq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens that meet in a chunk: gradients in B and C, and of row sums of logarithms.

        That of ``moved`` is put in its place.
        """
        n, b, G, q, J, P, N = chunks.shape
        rooms, moved = self.rooms, chunks.moved.view(-1, q, P)
        dy_nbHqP = rooms.of("dy by head", n, b, G * J, q, P)
        torch.mul(dy, chunks.by_token(chunks.decays.low), out=chunks.by_head(dy_nbHqP))
        between = chunks.decays.between(rooms.of("matrix", n, b, G * J, q, q))
        dmatrix = rooms.of("dmatrix", n, b, G * J, q, q)
        torch.bmm(dy_nbHqP.view(-1, q, P), moved.mT, out=dmatrix.view(-1, q, q))
        dmeets = rooms.of("dmeets", n, b, G, q, q)
        torch.sum(dmatrix.mul_(between).view(n, b, G, J, q, q), dim=3, out=dmeets)
        dmeets.masked_fill_(chunks.documents.apart, 0.0)
        down_nbGq = (own_nbHq * chunks.dt).view(n, b, G, J, q).sum(3)
        dmeets.diagonal(dim1=-2, dim2=-1).copy_(down_nbGq)
        dB, dC = rooms.of("dB", n, b, G, q, N), rooms.of("dC", n, b, G, q, N)
        torch.bmm(flat(dmeets).mT, flat(chunks.C), out=flat(dB))
        torch.bmm(flat(dmeets), flat(chunks.B), out=flat(dC))

        matrix = chunks.matrix_(between).view(-1, q, q)
        met = rooms.of("met", n, b, G * J, q, P)
        torch.bmm(matrix, moved, out=met.view(-1, q, P))
        row_nbHq = torch.mv(met.mul_(dy_nbHqP).view(-1, P), self.ones).view(n, b, G * J, q)
        torch.bmm(matrix.mT, dy_nbHqP.view(-1, q, P), out=moved)
        return dB, dC, row_nbHq

    def _read(self, chunks: Chunks, entered: Tensor, states: Tensor, dC: Tensor) -> Tensor:
        """What is read from states: adds to ``dC``, and gives row sums [n b H q]."""
        n, b, G, q, J, P, N = chunks.shape
        flat(dC).baddbmm_(flat(entered, 2), states[:n].view(-1, J * P, N))
        return self._sum(chunks.from_states(states, self.rooms).mul_(entered))

    def _inputs(
        self, span: Span, chunks: Chunks, dy: Tensor, dbehind: Tensor, dB: Tensor
    ) -> Tensor:
        """Adds to ``dB``, writes the gradient in x, and gives that in dt through ``dt x``."""
        n, b, G, q, J, P, N = chunks.shape
        rooms, decays = self.rooms, chunks.decays
        behind = dbehind.view(-1, J * P, N)
        flat(dB).baddbmm_(flat(chunks.left, 2), behind)
        dleft = rooms.of("read", n, b, G, q, J, P)
        torch.bmm(flat(chunks.B), behind.mT, out=flat(dleft, 2))
        dleft.mul_(chunks.by_token(decays.leave))
        dleft.addcmul_(chunks.by_head(chunks.moved), chunks.by_token(decays.unlow))

        product = rooms.of("product", *dy.shape)
        column_nbHq = self._sum(torch.mul(dleft, chunks.x, out=product))
        dx_nbqHP = span.of(self.gradients.x)
        narrow = dx_nbqHP.dtype != rooms.dtype
        wide_nbqHP = rooms.of("y", n, b, q, G * J, P) if narrow else dx_nbqHP
        dx = chunks.grouped(wide_nbqHP)
        torch.mul(dleft, chunks.by_token(chunks.dt), out=dx)
        dx.addcmul_(dy, chunks.by_token(chunks.skip(self.D)))
        if self.D is not None and self.D.dim() == 2:
            dx.addcmul_(dy, self.D.view(G, 1, J, P))
        if narrow:
            dx_nbqHP.copy_(wide_nbqHP)
        return column_nbHq

    def _steps(
        self,
        span: Span,
        chunks: Chunks,
        own_nbHq: Tensor,
        row_nbHq: Tensor,
        column_nbHq: Tensor,
        whole_nbH: Tensor,
    ) -> None:
        """Write the gradient in dt, and add to that in A."""
        n, b, G, q, J = chunks.shape[:5]
        dsums = (row_nbHq - chunks.dt * column_nbHq).double()
        dsums[..., -1] += whole_nbH
        dlog = dsums.flip(-1).cumsum_(-1).flip(-1)
        self.dA += (dlog * chunks.dt).sum((0, 1, 3))
        own = own_nbHq.view(n, b, G, J, q) * chunks.own[:, :, :, None]
        ddt = column_nbHq + own.view(n, b, G * J, q) + (dlog * self.A[:, None]).to(self.A.dtype)
        span.of(self.gradients.dt).transpose(2, 3).copy_(ddt)

    def _sum(self, product_nbGqJP: Tensor) -> Tensor:
        """The sum over features, of heads and tokens [n b H q]."""
        n, b, G, q, J, P = product_nbGqJP.shape
        sums = torch.mv(product_nbGqJP.view(-1, P), self.ones)
        return sums.view(n, b, G, q, J).transpose(3, 4).reshape(n, b, G * J, q)


def _inner(a: Tensor, b: Tensor, rooms: Rooms) -> Tensor:
    """Inner products of states [n b H P N], of each head [n b H]."""
    return torch.mul(a, b, out=rooms.of("inner", *a.shape)).sum((-1, -2))
