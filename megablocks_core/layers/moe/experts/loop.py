"""Expert after expert, in plain torch: what every other form must equal.

Dimensions: N places, H hidden size, e experts here.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.experts.places import host_counts, starts_of
from megablocks_core.layers.moe.experts.projections import Formula, Projections


def loop(dispatched: Dispatched, projections: Projections, formula: Formula) -> Tensor:
    """Weighted results of the experts [N H], zero in empty places. Autograd keeps all it likes."""
    counts = host_counts(dispatched)
    y_NH = dispatched.x.new_zeros(dispatched.rows.shape[0], dispatched.x.shape[1])
    starts, pieces, end = starts_of(dispatched, counts), [], 0
    for start, count, expert in zip(starts, counts, projections.unstacked(), strict=True):
        places = slice(start, start + count)
        x_nH = dispatched.x[dispatched.rows[places]]
        pieces += [y_NH[end:start], _expert(x_nH, dispatched.weights[places], expert, formula)]
        end = places.stop
    return torch.cat([*pieces, y_NH[end:]])


def _expert(x_nH: Tensor, weights_n: Tensor, expert: Projections, formula: Formula) -> Tensor:
    weights_n1, dtype = weights_n.unsqueeze(-1), x_nH.dtype
    if formula.weigh == "input":
        x_nH = (x_nH * weights_n1).to(dtype)
    gate_nf = None if expert.gate is None else linear(x_nH, expert.gate, expert.gate_bias)
    hidden_nf = formula.activation.forward(gate_nf, linear(x_nH, expert.up, expert.up_bias))
    if formula.weigh != "hidden":
        y_nH = linear(hidden_nf, expert.down, expert.down_bias)
        return (y_nH * weights_n1).to(dtype) if formula.weigh == "output" else y_nH
    y_nH = linear((hidden_nf * weights_n1).to(dtype), expert.down)
    return y_nH if expert.down_bias is None else y_nH + (weights_n1 * expert.down_bias).to(dtype)
