"""What forward and backward both make of a span of chunks.

Inside a chunk, tokens meet through a matrix of decays and of C B^T, which heads of a group share
(arXiv:2405.21060, section 6). The meeting of a token with itself does not decay: it is a factor
of ``x``, beside D, and no part of the matrix, so that gradients of decays hold no large numbers
that cancel.

Dimensions: n chunks of b rows, q tokens of a chunk, H heads in G groups of J, P features of a
head, N features of a state.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.ssd.decays import (
    Documents,
    causal,
    decays_of,
    parted,
)
from megablocks_core.layers.ssm.functions.ssd.rooms import Rooms
from megablocks_core.layers.ssm.functions.ssd.spans import Span


class Inputs(NamedTuple):
    """What the scan reads.

    Attributes:
        x: [B L H P].
        dt: [B L H].
        A: [H].
        B: [B L G N].
        C: [B L G N].
        D: [H], [H P] or ``None``.
        entries: Added to the state behind each chunk [chunks B H P N], or ``None``.
        document: Each token's document, if there are several [L].
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    entries: Tensor | None
    document: Tensor | None


class Chunks:
    """A span of chunks, ready to be multiplied.

    Attributes:
        x: Its tokens in the order of groups [n b G q J P].
        dt: [n b H q].
        B, C: [n b G q N].
        decays: Of its tokens.
        documents: Which tokens belong together.
        own: C_i B_i of each token [n b G q].
        meets: C_i B_j of earlier tokens j of a token's document, else 0 [n b G q q].
        moved: ``unlow dt x`` of each head [n b H q P].
        left: What each token adds to the state behind the chunk, but for B [n b G q J P].
    """

    def __init__(self, inputs: Inputs, span: Span, rooms: Rooms) -> None:
        x_nbqHP = rooms.wide("x", span.of(inputs.x))
        B_nbqGN, C_nbqGN = span.of(inputs.B), span.of(inputs.C)
        n, b, q, H, P = x_nbqHP.shape
        G, N = B_nbqGN.shape[-2:]
        self.shape = (n, b, G, q, H // G, P, N)
        self.x = self.grouped(x_nbqHP)
        self.dt = rooms.of("dt", n, b, H, q).copy_(span.of(inputs.dt).transpose(2, 3))
        self.B = rooms.of("B", n, b, G, q, N).copy_(B_nbqGN.transpose(2, 3))
        self.C = rooms.of("C", n, b, G, q, N).copy_(C_nbqGN.transpose(2, 3))
        self.documents = _documents(inputs.document, span, inputs.x.device)
        self.decays = decays_of(self.dt, inputs.A.to(rooms.dtype), self.documents, rooms)

        self.meets = rooms.of("meets", n, b, G, q, q)
        torch.bmm(flat(self.C), flat(self.B).mT, out=flat(self.meets))
        self.own = self.meets.diagonal(dim1=-2, dim2=-1).clone()
        self.meets.masked_fill_(self.documents.apart, 0.0)
        self.moved = rooms.of("moved", n, b, H, q, P)
        factor_nbHq = self.dt * self.decays.unlow
        torch.mul(x_nbqHP.transpose(2, 3), factor_nbHq[..., None], out=self.moved)
        self.left = rooms.of("left", n, b, G, q, H // G, P)
        torch.mul(self.x, self.by_token(self.dt * self.decays.leave), out=self.left)

    def grouped(self, x_nbqHP: Tensor) -> Tensor:
        """A view [n b G q J P] of [n b q H P]."""
        G = self.shape[2]
        return x_nbqHP.unflatten(3, (G, x_nbqHP.shape[3] // G)).transpose(2, 3)

    def by_token(self, factor_nbHq: Tensor) -> Tensor:
        """A view [n b G q J 1] of a factor of each head and token [n b H q]."""
        G, J = self.shape[2], self.shape[4]
        return factor_nbHq.unflatten(2, (G, J)).transpose(3, 4)[..., None]

    def by_head(self, x_nbHqP: Tensor) -> Tensor:
        """A view [n b G q J P] of [n b H q P]."""
        G, J = self.shape[2], self.shape[4]
        return x_nbHqP.unflatten(2, (G, J)).transpose(3, 4)

    def skip(self, D: Tensor | None) -> Tensor:
        """The factor of a token's own x in its y [n b H q], with D [H] in it if it is such."""
        n, b, G, q, J = self.shape[:5]
        factor = (self.dt.view(n, b, G, J, q) * self.own[:, :, :, None]).view(n, b, G * J, q)
        return factor if D is None or D.dim() == 2 else factor.add_(D[:, None])

    def matrix_(self, between: Tensor) -> Tensor:
        """Multiply decays between tokens [n b H q q] by ``meets``, in place."""
        n, b, G, q, J = self.shape[:5]
        between.view(n, b, G, J, q, q).mul_(self.meets[:, :, :, None])
        return between

    def states(self, state_bHPN: Tensor, entries: Tensor | None, rooms: Rooms) -> Tensor:
        """The states before the chunks and behind the last one [n+1 b H P N].

        Args:
            state_bHPN: The state before the first.
            entries: Added to the state behind each chunk [n b H P N].
            rooms: Where they are put.
        """
        n, b, G, q, J, P, N = self.shape
        states = rooms.of("states", n + 1, b, G * J, P, N)
        added = rooms.of("added", n, b, G * J, P, N)
        torch.bmm(flat(self.left, 2).mT, flat(self.B), out=added.view(-1, J * P, N))
        if entries is not None:
            added.add_(entries)
        states[0] = state_bHPN
        for chunk in range(n):
            passing = self.decays.passing[chunk, :, :, None, None]
            torch.addcmul(added[chunk], states[chunk], passing, out=states[chunk + 1])
        return states

    def from_states(self, states: Tensor, rooms: Rooms) -> Tensor:
        """C times the state before the chunk, which has not yet decayed [n b G q J P]."""
        n, b, G, q, J, P, N = self.shape
        read = rooms.of("read", n, b, G, q, J, P)
        before = states[:n].view(-1, J * P, N)
        torch.bmm(flat(self.C), before.mT, out=flat(read, 2))
        return read


def flat(x: Tensor, features: int = 1) -> Tensor:
    """A batch of matrices whose columns are the last dimensions."""
    rows = x.shape[-features - 1]
    return x.view(-1, rows, x.shape[-features:].numel())


def _documents(document_L: Tensor | None, span: Span, device: torch.device) -> Documents:
    if document_L is None:
        return causal(span.length, device)
    stop = span.start + span.number * span.length
    first = max(span.start - 1, 0)
    document_nq = document_L[span.start : stop].view(span.number, span.length)
    before = torch.cat((document_L[first : first + 1], document_nq[:-1, -1]))
    return parted(document_nq, before)
