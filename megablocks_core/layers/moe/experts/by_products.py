"""Experts as three products of rows that lie expert after expert, computed by whoever is asked.

Dimensions: e experts here, i features here, H hidden size, M rows, N places, n filled ones.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.experts.experts import GroupedExperts
from megablocks_core.layers.moe.experts.places import host_counts, starts_of
from megablocks_core.parallel.transformer_engine.grouped_linear import Alignment

# Of "gate", "up" or "down", of rows and how many each expert has; with the bias but for "down".
Product = Callable[[str, Tensor, list[int]], Tensor]


def by_products(
    experts: GroupedExperts, dispatched: Dispatched, product: Product, *, multiple: int = 1
) -> Tensor:
    """Weighted results of the experts here, a row for each place [N H]. Reads counts on the host.

    Args:
        experts: Whose projections these are.
        dispatched: Their tokens.
        product: What computes.
        multiple: Zeros follow each expert's rows, so that it divides how many they are.

    Raises:
        ValueError: ``x`` has another number of features.
    """
    x_MH, width, weigh = dispatched.x, experts.hidden_size, experts.weigh
    if x_MH.shape[-1] != width:
        raise ValueError(f"x of shape {list(x_MH.shape)} must be [M {width}]")
    counts = host_counts(dispatched)
    filled_n = _filled(dispatched, counts)
    weights_n1 = dispatched.weights[filled_n].unsqueeze(-1)
    aligned = Alignment(counts, multiple, x_MH.device)
    x_nH = x_MH[dispatched.rows[filled_n]]
    if weigh == "input":
        x_nH = (x_nH * weights_n1).to(x_nH.dtype)
    x_nH = aligned.padded(x_nH)
    gate_ni = None if experts.gate_proj is None else product("gate", x_nH, aligned.counts)
    h_ni = experts.formula.activation.forward(gate_ni, product("up", x_nH, aligned.counts))
    if weigh == "hidden":
        h_ni = (h_ni * aligned.padded(weights_n1)).to(h_ni.dtype)
    y_nH = aligned.taken(product("down", h_ni, aligned.counts))
    down_bias_eH = experts._projections().down_bias
    if weigh == "output":
        y_nH = (y_nH * weights_n1).to(y_nH.dtype)
    if down_bias_eH is not None:
        experts_n = torch.repeat_interleave(
            torch.tensor(counts, device=x_MH.device), output_size=len(filled_n)
        )
        bias_nH = down_bias_eH[experts_n]
        y_nH = y_nH + (bias_nH if weigh == "input" else weights_n1 * bias_nH).to(y_nH.dtype)
    y_NH = y_nH.new_zeros(len(dispatched.rows), width)
    return y_NH.index_copy(0, filled_n, y_nH)


def _filled(dispatched: Dispatched, counts: list[int]) -> Tensor:
    """The places that are not empty, in order [n]."""
    device = dispatched.rows.device
    if dispatched.capacity is None:
        return torch.arange(sum(counts), device=device)
    held = torch.tensor(counts, device=device)
    first = torch.tensor(starts_of(dispatched, counts), device=device)
    shift = (first - held.cumsum(0) + held).repeat_interleave(held, output_size=sum(counts))
    return torch.arange(sum(counts), device=device) + shift
