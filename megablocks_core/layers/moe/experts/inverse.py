"""The sum over the places that read a row of the tokens, without atomics.

Dimensions: M rows, N places, k at most so many places a row, H hidden size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.dispatch.assignment import sum_places, take_rows


class Inverse(NamedTuple):
    """For each row the places that read it.

    Attributes:
        places: As a dispatcher knows them [M k], -1 where there is none; else the filled places
            in the order of their rows [N].
        lengths: How many of these each row has [M], if the dispatcher did not know them.
    """

    places: Tensor
    lengths: Tensor | None = None


def inverse_of(dispatched: Dispatched) -> Inverse:
    """By the dispatcher's own knowledge, else by a stable sort; nothing is read on the host."""
    if dispatched.places is not None:
        return Inverse(dispatched.places)
    num_rows, rows = dispatched.x.shape[0], dispatched.rows
    sorted_rows, places = torch.where(rows < 0, num_rows, rows).sort(stable=True)
    bounds = torch.arange(num_rows + 1, device=rows.device)
    return Inverse(places, torch.searchsorted(sorted_rows, bounds).diff())


def sum_inverse(dx_NH: Tensor, inverse: Inverse) -> Tensor:
    """For each row the sum over its places, in their order [M H]; zero if there is none."""
    if inverse.lengths is None:
        return sum_places(dx_NH, inverse.places)
    if inverse.lengths.numel() == 0:
        return dx_NH.new_zeros(0, dx_NH.shape[1])
    in_order_NH = dx_NH.index_select(0, inverse.places)
    return torch.segment_reduce(in_order_NH, "sum", lengths=inverse.lengths, initial=0, unsafe=True)


def take_places(x_MH: Tensor, rows_N: Tensor, inverse: Inverse) -> Tensor:
    """The row that each place reads [N H], zero where it is empty; backward sums places."""
    return _TakePlaces.apply(x_MH, rows_N, *inverse)


class _TakePlaces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MH: Tensor, rows_N: Tensor, places: Tensor, lengths: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(places, lengths)
        return take_rows(x_MH, rows_N)

    @staticmethod
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Any, ...]:
        return sum_inverse(dy_NH, Inverse(*ctx.saved_tensors)), None, None, None
