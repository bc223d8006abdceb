"""Experts as products of block-sparse matrices, in plain torch (MegaBlocks,
https://arxiv.org/abs/2211.15841, sections 4 and 5).

Each expert's rows are padded to whole blocks. The hidden activations of all experts side by side
[R e i] are then zero but in blocks that pair a row block with the features of its expert: the
topology. The first products make those blocks alone (``sdd``: sparse from dense and dense), the
last takes them (``dsd``). No capacity bounds an expert, and no product has another shape.

Dimensions: N places, R padded rows, r row blocks, b rows of a block, H hidden size, e experts
here, i features here, c blocks of f features each.
"""

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.experts.inverse import Inverse, inverse_of, take_places
from megablocks_core.layers.moe.experts.passes import hidden, scaled
from megablocks_core.layers.moe.experts.places import host_counts, starts_of
from megablocks_core.layers.moe.experts.projections import Formula, Projections

BLOCK = 128


class Topology(NamedTuple):
    """Which blocks of the hidden activations are not zero.

    Attributes:
        row_blocks: How many row blocks each expert has.
        columns: c, blocks of features of an expert; each row block has all of its expert's.
    """

    row_blocks: tuple[int, ...]
    columns: int

    def of_rows(self, stack: Tensor) -> Tensor:
        """What each row block's expert has of a stack [e ...] -> [r ...]."""
        parts = zip(stack.unbind(0), self.row_blocks, strict=True)
        return torch.cat([one.expand(count, *one.shape) for one, count in parts])


def block_sparse(dispatched: Dispatched, projections: Projections, formula: Formula) -> Tensor:
    """Weighted results of the experts [N H], zero in empty places."""
    counts = host_counts(dispatched)
    features = projections.up.shape[1]
    row_blocks = tuple(-(-count // BLOCK) for count in counts)
    topology = Topology(row_blocks, features // max(gcd(features, BLOCK), 1))
    place_R = _padded_places(dispatched, counts)
    row_N1 = torch.full_like(dispatched.rows, -1).unsqueeze(-1)
    filled = (place_R >= 0).nonzero().squeeze(-1)
    row_N1[place_R[filled], 0] = filled
    padded = dispatched._replace(
        rows=torch.where(place_R < 0, -1, dispatched.rows[place_R.clamp(min=0)]), places=None
    )
    x_RH = take_places(dispatched.x, padded.rows, inverse_of(padded))
    weights_R = take_places(dispatched.weights.unsqueeze(-1), place_R, Inverse(row_N1)).squeeze(-1)
    if formula.weigh == "input":
        x_RH = scaled(x_RH, weights_R)
    y_RH = _apply(x_RH, weights_R, projections, formula, topology)
    return take_places(y_RH, row_N1.squeeze(-1), Inverse(place_R.unsqueeze(-1)))


def sdd(x_RH: Tensor, w_eiH: Tensor, topology: Topology) -> Tensor:
    """The blocks of ``x W^T`` that the topology has [r c b f]."""
    num_experts, features, hidden_size = w_eiH.shape
    blocks = w_eiH.view(num_experts, topology.columns, features // topology.columns, hidden_size)
    x_r1bH = x_RH.view(-1, 1, BLOCK, hidden_size)
    return x_r1bH @ topology.of_rows(blocks).transpose(-1, -2)


def dsd(values_rcbf: Tensor, w_eHi: Tensor, topology: Topology) -> Tensor:
    """The product of a block-sparse matrix and ``W^T`` [R H]."""
    blocks_eHcf = w_eHi.unflatten(2, (topology.columns, -1))
    blocks_rcfH = topology.of_rows(blocks_eHcf.permute(0, 2, 3, 1))
    return (values_rcbf @ blocks_rcfH).sum(1).flatten(0, 1)


def _apply(
    x_RH: Tensor,
    weights_R: Tensor,
    projections: Projections,
    formula: Formula,
    topology: Topology,
) -> Tensor:
    gate_rcbf = None
    if projections.gate is not None:
        gate_rcbf = _with_bias(
            sdd(x_RH, projections.gate, topology), projections.gate_bias, topology
        )
    up_rcbf = _with_bias(sdd(x_RH, projections.up, topology), projections.up_bias, topology)
    hidden_rcbf = hidden(formula.activation, gate_rcbf, up_rcbf, None)
    if formula.weigh == "hidden":
        weights_r1b1 = weights_R.view(-1, 1, BLOCK, 1)
        hidden_rcbf = (hidden_rcbf * weights_r1b1).to(x_RH.dtype)
    y_RH, bias = dsd(hidden_rcbf, projections.down, topology), projections.down_bias
    if bias is not None:
        bias_RH = topology.of_rows(bias.unsqueeze(1).expand(-1, BLOCK, -1)).flatten(0, 1)
        y_RH = y_RH + (scaled(bias_RH, weights_R) if formula.weigh == "hidden" else bias_RH)
    return scaled(y_RH, weights_R) if formula.weigh == "output" else y_RH


def _with_bias(values_rcbf: Tensor, bias_ei: Tensor | None, topology: Topology) -> Tensor:
    if bias_ei is None:
        return values_rcbf
    bias_ecf = bias_ei.unflatten(1, (topology.columns, -1))
    return values_rcbf + topology.of_rows(bias_ecf).unsqueeze(2)


def _padded_places(dispatched: Dispatched, counts: list[int]) -> Tensor:
    """The place of each padded row [R]; -1 of padding."""
    pieces = [dispatched.rows.new_empty(0)]
    for start, count in zip(starts_of(dispatched, counts), counts, strict=True):
        pieces.append(torch.arange(start, start + count, device=dispatched.rows.device))
        pieces.append(dispatched.rows.new_full((-count % BLOCK,), -1))
    return torch.cat(pieces)
