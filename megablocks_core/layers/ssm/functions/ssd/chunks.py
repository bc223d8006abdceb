"""What forward and backward both know of chunks before they multiply.

Inside a chunk, tokens meet through a matrix of decays and of C B^T, which heads of a group share
(arXiv:2405.21060, section 6). The meeting of a token with itself does not decay: it is a factor
of ``x``, beside D, and no part of the matrix, so that gradients of decays hold no large numbers
that cancel.

Dimensions: c chunks of b rows, q tokens of a chunk, H heads in G groups of J, P features of a
head, N features of a state.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.ssd.decays import Documents, causal, decays_of, parted
from megablocks_core.layers.ssm.functions.ssd.plan import Region


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
    """The chunks of a region: what is small beside ``x``, of all of them at once.

    Attributes:
        x: [c b G q J P], a view.
        dt: [c b H q].
        B, C: [c b G q N].
        decays: Of its tokens.
        documents: Which tokens belong together.
        own: C_i B_i of each token [c b G q].
        meets: C_i B_j of earlier tokens j of a token's document, else 0 [c b G q q].
        skip: The factor of a token's own x in its y [c b H q], with D [H] in it if it is such.
    """

    def __init__(self, inputs: Inputs, region: Region, dtype: torch.dtype) -> None:
        self.groups = inputs.B.shape[2]
        self.x = self.grouped(region.of(inputs.x))
        self.B, self.C = (
            region.of(part).transpose(2, 3).to(dtype).contiguous() for part in (inputs.B, inputs.C)
        )
        self.dt = region.of(inputs.dt).transpose(2, 3).to(dtype).contiguous()
        self.documents = _documents(inputs.document, region, inputs.x.device)
        self.decays = decays_of(self.dt, inputs.A.to(dtype), self.documents)
        self.meets = self.B.new_empty((*self.B.shape[:-1], region.length))
        torch.bmm(self.C.flatten(0, 2), self.B.flatten(0, 2).mT, out=self.meets.flatten(0, 2))
        self.own = self.meets.diagonal(dim1=-2, dim2=-1).clone()
        self.meets.masked_fill_(self.documents.apart, 0.0)
        by_group = self.dt.unflatten(2, (self.groups, -1)) * self.own[:, :, :, None]
        self.skip = by_group.flatten(2, 3)
        if inputs.D is not None and inputs.D.dim() == 1:
            self.skip.add_(inputs.D[:, None])

    def grouped(self, x_cbqHP: Tensor) -> Tensor:
        """A view [c b G q J P] of [c b q H P]."""
        return x_cbqHP.unflatten(3, (self.groups, -1)).transpose(2, 3)

    def by_token(self, factor_cbHq: Tensor) -> Tensor:
        """A view [c b G q J 1] of a factor of each head and token [c b H q]."""
        return factor_cbHq.unflatten(2, (self.groups, -1)).transpose(3, 4)[..., None]


def _documents(document_L: Tensor | None, region: Region, device: torch.device) -> Documents:
    if document_L is None:
        return causal(region.length, device)
    first = max(region.start - 1, 0)
    stop = region.start + region.number * region.length
    document_cq = document_L[region.start : stop].view(region.number, region.length)
    before = torch.cat((document_L[first : first + 1], document_cq[:-1, -1]))
    return parted(document_cq, before)
