"""Slots in the order of their experts, and the way back.

Nothing here reads a value on the host, and every sum is a gather: the same bits in each run.

Dimensions: T tokens, k slots a token, E experts, C places an expert, N places of all experts, H
features.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megablocks_core.layers.moe.counting import bounds, sort_keys

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Order(NamedTuple):
    """Which slot lies in which place.

    Attributes:
        slots: The slot t k + s in each place [N]; -1 where it is empty.
        rows: Its token t [N]; -1 where it is empty.
        places: The place of each slot [T k]; -1 where it has none.
        counts: Places that each expert fills [E], int64.
    """

    slots: Tensor
    rows: Tensor
    places: Tensor
    counts: Tensor

    def take(self, values_Tk: Tensor) -> Tensor:
        """What each place has of values of the slots [N]; 0 where it is empty."""
        return _Take.apply(values_Tk.reshape(-1), self.slots, self.places.reshape(-1))


def by_expert(indices_Tk: Tensor, num_experts: int, *, capacity: int | None = None) -> Order:
    """The slots sorted by expert, and inside an expert by token and slot.

    Without a capacity N = T k, and the slots without an expert leave the last places empty.
    With one N = E C, expert e has the places from e C on, and slots beyond them are dropped.

    Args:
        indices_Tk: Expert of each slot [T k], int64; negative: none.
        num_experts: E.
        capacity: C.
    """
    experts = indices_Tk.reshape(-1)
    keys, slots = sort_keys(indices_Tk, num_experts).sort(stable=True)
    edges = bounds(keys, num_experts)
    starts, counts = edges[:-1], edges.diff()
    places = _inverse(slots)
    if capacity is None:
        slots = torch.where(keys < num_experts, slots, -1)
    else:
        counts = counts.clamp(max=capacity)
        inside = torch.arange(capacity, device=keys.device)
        filled = inside < counts[:, None]
        sorted_place = torch.where(filled, starts[:, None] + inside, 0)
        slots = torch.where(filled, _at(slots, sorted_place), -1).reshape(-1)
        rank_in_expert = places - _at(starts, experts.clamp(min=0))
        places = torch.where(rank_in_expert < capacity, experts * capacity + rank_in_expert, -1)
    places = torch.where(experts < 0, -1, places).view_as(indices_Tk)
    rows = torch.where(slots < 0, -1, slots // max(indices_Tk.shape[-1], 1))
    return Order(slots, rows, places, counts)


def take_rows(x_MH: Tensor, rows_N: Tensor) -> Tensor:
    """Rows of ``x``, zero where the index is negative [N H]. No gradient flows."""
    if torch.compiler.is_compiling():
        if not statically_known_true(x_MH.shape[0] > 0):  # a number that comes with the data
            x_MH = torch.cat([x_MH, x_MH.new_zeros(1, *x_MH.shape[1:])])
    elif x_MH.shape[0] == 0:
        return x_MH.new_zeros(rows_N.shape[0], *x_MH.shape[1:])
    taken = x_MH.index_select(0, rows_N.clamp(min=0))
    # By their bits: zero times what lies there might be NaN, and a masked fill takes far longer.
    words = taken.view(_WORDS[taken.element_size()])
    words &= (rows_N < 0).to(words.dtype).sub(1).view(-1, *[1] * (x_MH.dim() - 1))
    return taken


def sum_places(rows_NH: Tensor, places_Mk: Tensor) -> Tensor:
    """For each row the sum over its places, from the first to the last [M H]. No gradient flows."""
    if places_Mk.shape[1] == 0:
        return rows_NH.new_zeros(places_Mk.shape[0], rows_NH.shape[1])
    total_MH = take_rows(rows_NH, places_Mk[:, 0])
    for slot in range(1, places_Mk.shape[1]):
        total_MH += take_rows(rows_NH, places_Mk[:, slot])
    return total_MH


def sum_slots(y_NH: Tensor, order: Order, *, last: bool = False) -> Tensor:
    """For each token the sum of its slots' rows, from the first slot to the last [T H].

    Backward gives each place the gradient of its token; nothing of size [N H] is kept.

    Args:
        y_NH: Rows.
        order: Of the slots.
        last: ``y`` came by a message and nothing is computed of the sum: a recomputed region then
            keeps the order's integers [N], and ends before that message.
    """
    return _SumSlots.apply(y_NH, order.places, order.rows, last)


def copy_slots(
    x_TH: Tensor,
    order: Order,
    *,
    taken: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """The row of its token for each place, in consecutive pieces; the adjoint of ``sum_slots``.

    Backward sums the gradients of a token's slots from the first to the last.

    Args:
        x_TH: Tokens [T H].
        order: Of their slots.
        taken: ``take_rows(x_TH.detach(), order.rows)``, where the caller had it early.
        sizes: Places of each piece; what they leave out at the end is empty. Default: one piece.
    """
    if taken is None:
        taken = take_rows(x_TH.detach(), order.rows)
    return _CopySlots.apply(x_TH, taken, order.places, sizes)


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Pieces one after another; one alone is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def cut(x_N: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive pieces of these sizes, from the first row; what follows them is left out."""
    # By narrow, which compiles for sizes that come with the data.
    starts = accumulate(sizes, initial=0)
    return [x_N.narrow(0, start, size) for start, size in zip(starts, sizes, strict=False)]


def _inverse(permutation: Tensor) -> Tensor:
    places = torch.arange(permutation.shape[0], device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.new_zeros(index.shape) if values.numel() == 0 else values[index]


class _Take(torch.autograd.Function):
    """A gather whose backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(slots, places)
        return take_rows(values, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        slots, places = ctx.saved_tensors
        return _Take.apply(grad, places, slots), None, None


class _SumSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, places_Tk: Tensor, rows_N: Tensor, last: bool) -> Tensor:
        ctx.rows = rows_N if last and not torch.compiler.is_compiling() else None
        if ctx.rows is None:
            ctx.save_for_backward(rows_N)
        return sum_places(y_NH, places_Tk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Any, ...]:
        rows_N = ctx.saved_tensors[0] if ctx.rows is None else ctx.rows
        return take_rows(dy_TH, rows_N), None, None, None


class _CopySlots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, taken: Tensor, places_Tk: Tensor, sizes: Sequence[int] | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(places_Tk)
        sizes = (taken.shape[0],) if sizes is None else sizes
        return tuple(cut(taken, sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *pieces: Tensor) -> tuple[Any, ...]:
        (places_Tk,) = ctx.saved_tensors
        return sum_places(joined(pieces), places_Tk), None, None, None
