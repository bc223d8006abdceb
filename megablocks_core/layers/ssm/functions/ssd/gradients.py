"""Gradients of the scan, from what backward finds of each head and token.

A decay is in every term that leads from an earlier token to its own or a later one, or from or to
a state outside. Its gradient is the sum of those terms times their gradients: sums of what is
there, no differences, so that small ones keep their digits beside large ones.

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
        crossing: Those in the logarithm of each decay, from tokens that meet [c b H q].
        own: Inner products of dy and x [c b G q J].
        read: Those of dy and what y has from the state before the chunk.
        left: Those of x and the gradient in ``dt x`` that comes from the state behind the chunk.
        input: Those of x and the whole gradient in ``dt x``.
        passing: Those of the states before chunks, decayed, and of the gradients in the states
            behind them [c b H].
        D: Sums of dy times x over tokens [G J P], if D is of features.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.B, self.C = torch.zeros_like(chunks.B), torch.zeros_like(chunks.C)
        self.meets = torch.zeros_like(chunks.meets)
        self.crossing = torch.empty_like(chunks.dt)
        sizes, like = chunks.x.shape, chunks.dt
        self.own, self.read, self.left, self.input = (like.new_empty(sizes[:5]) for _ in range(4))
        self.passing = like.new_empty(like.shape[:3])
        self.D = like.new_zeros(sizes[2], *sizes[4:])

    def finish(
        self,
        inputs: Inputs,
        chunks: Chunks,
        region: Region,
        gradients: Gradients,
        totals: Totals,
    ) -> None:
        """Write the gradients of B, C and dt, and add to those of A and D."""
        own, read, left, column = (
            x.transpose(3, 4).flatten(2, 3) for x in (self.own, self.read, self.left, self.input)
        )
        dlog = self.crossing.double() + self.passing[..., None]
        dlog += read.double().flip(-1).cumsum(-1).flip(-1)
        # A decay is in what earlier tokens leave, and not in what its own does.
        dlog[..., 1:] += (chunks.dt * left)[..., :-1].double().cumsum(-1)
        totals.A.add_((dlog * chunks.dt).sum((0, 1, 3)))
        groups = (chunks.groups, -1)
        itself_dt = (own.unflatten(2, groups) * chunks.own[:, :, :, None]).flatten(2, 3)
        ddt = column + itself_dt + dlog * inputs.A[:, None]
        region.of(gradients.dt).transpose(2, 3).copy_(ddt)
        if totals.D is not None:
            each = own.sum((0, 1, 3)) if totals.D.dim() == 1 else self.D.view(totals.D.shape)
            totals.D.add_(each)

        self.meets.masked_fill_(chunks.documents.apart, 0.0)
        itself = (own * chunks.dt).unflatten(2, groups).sum(3)
        self.meets.diagonal(dim1=-2, dim2=-1).copy_(itself)
        meets = flat(self.meets)
        flat(self.B).baddbmm_(meets.mT, flat(chunks.C))
        flat(self.C).baddbmm_(meets, flat(chunks.B))
        region.of(gradients.B).transpose(2, 3).copy_(self.B)
        region.of(gradients.C).transpose(2, 3).copy_(self.C)
