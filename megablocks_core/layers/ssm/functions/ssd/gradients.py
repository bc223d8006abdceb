"""Gradients of the scan, from what backward finds of each head and token.

The sum of logarithms cs_i up to token i is in every term of y_i, and so is -cs_j in every term
that holds x_j: their gradients are inner products of what is there with its gradient, without a
pass over pairs of tokens.

Dimensions: c chunks of b rows, q tokens of a chunk, H heads in G groups of J, P features of a
head, N features of a state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.ssd.chunks import Chunks, Inputs
from megablocks_core.layers.ssm.functions.ssd.plan import Region
from megablocks_core.layers.ssm.functions.ssd.rooms import flat


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


class Totals:
    """Gradients of what all tokens share, added up in float64."""

    def __init__(self, inputs: Inputs) -> None:
        self.A = torch.zeros_like(inputs.A, dtype=torch.float64)
        self.D = None if inputs.D is None else torch.zeros_like(inputs.D, dtype=torch.float64)

    def write(self, gradients: Gradients) -> None:
        """Round them, once."""
        gradients.A.copy_(self.A)
        if self.D is not None:
            gradients.D.copy_(self.D)


class Found:
    """What is found of a region.

    Attributes:
        B, C: Gradients from states [c b G q N].
        meets: Those in C_i B_j, also where tokens do not meet [c b G q q].
        own: Inner products of dy and x [c b H q].
        row: Those of dy and of what decays in y.
        column: Those of x and the gradient in ``dt x``.
        whole: Those of the states behind chunks and their gradients [c b H].
        D: Sums of dy times x over tokens [H P], if D is of features.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.B, self.C = torch.zeros_like(chunks.B), torch.zeros_like(chunks.C)
        self.meets = torch.zeros_like(chunks.meets)
        self.own, self.row, self.column = (torch.empty_like(chunks.dt) for _ in range(3))
        self.whole = chunks.dt.new_empty(chunks.dt.shape[:3])
        self.D = chunks.dt.new_zeros(chunks.x.shape[2:6:2] + chunks.x.shape[5:])

    def finish(
        self,
        inputs: Inputs,
        chunks: Chunks,
        region: Region,
        gradients: Gradients,
        totals: Totals,
    ) -> None:
        """Write the gradients of B, C and dt, and add to those of A and D."""
        dsums = (self.row - chunks.dt * self.column).double()
        dsums[..., -1] += self.whole
        dlog = dsums.flip(-1).cumsum(-1).flip(-1)
        totals.A.add_((dlog * chunks.dt).sum((0, 1, 3)))
        groups = (chunks.groups, -1)
        own = (self.own.unflatten(2, groups) * chunks.own[:, :, :, None]).flatten(2, 3)
        ddt = self.column + own + dlog * inputs.A[:, None]
        region.of(gradients.dt).transpose(2, 3).copy_(ddt)
        if totals.D is not None:
            each = self.own.sum((0, 1, 3)) if totals.D.dim() == 1 else self.D.view(totals.D.shape)
            totals.D.add_(each)

        self.meets.masked_fill_(chunks.documents.apart, 0.0)
        itself = (self.own * chunks.dt).unflatten(2, groups).sum(3)
        self.meets.diagonal(dim1=-2, dim2=-1).copy_(itself)
        meets = flat(self.meets)
        flat(self.B).baddbmm_(meets.mT, flat(chunks.C))
        flat(self.C).baddbmm_(meets, flat(chunks.B))
        region.of(gradients.B).transpose(2, 3).copy_(self.B)
        region.of(gradients.C).transpose(2, 3).copy_(self.C)
