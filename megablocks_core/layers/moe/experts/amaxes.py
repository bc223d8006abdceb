"""Largest magnitudes of what experts multiply, expert after expert: scales are made of them.

Dimensions: n places of an expert, H hidden size, e experts here, f features here.
"""

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import linear

from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.experts.places import host_counts, starts_of
from megablocks_core.layers.moe.experts.projections import Formula, Projections


def input_amaxes(
    dispatched: Dispatched, projections: Projections, formula: Formula
) -> dict[str, Tensor]:
    """Of the inputs of "gate" (if there is one), "up" and "down", float32 [e]; -inf of nothing.

    The hidden activation is that before a place's weight: an inference server weighs outputs.
    """
    counts = host_counts(dispatched)
    names = [name for name in ("gate", "up", "down") if getattr(projections, name) is not None]
    found = {name: [-inf] * len(counts) for name in names}
    starts = starts_of(dispatched, counts)
    for index, expert in enumerate(projections.unstacked()):
        if counts[index]:
            places = slice(starts[index], starts[index] + counts[index])
            x_nH = dispatched.x[dispatched.rows[places]]
            if formula.weigh == "input":
                x_nH = (x_nH * dispatched.weights[places].unsqueeze(-1)).to(x_nH.dtype)
            gate_nf = None if expert.gate is None else linear(x_nH, expert.gate, expert.gate_bias)
            hidden_nf = formula.activation.forward(gate_nf, linear(x_nH, expert.up, expert.up_bias))
            for name in names:
                seen = hidden_nf if name == "down" else x_nH
                found[name][index] = seen.abs().amax().float().item()
    device = dispatched.x.device
    return {name: torch.tensor(own, device=device) for name, own in found.items()}
