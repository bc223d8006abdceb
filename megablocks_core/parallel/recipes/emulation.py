"""A linear layer's three products with rounded operands, in plain torch on any device.

What low-precision hardware computes, but for the order of sums: operands are rounded to numbers
and factors, and multiplied as the wide values that those stand for. Rounding runs along the
dimension that a product sums over, so the input, the weight and the gradient of the output are
each rounded twice where blocks are lines.

Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.groups import LOCAL, Group
from megablocks_core.numbers.formats import wide
from megablocks_core.parallel.memory.replay import remember
from megablocks_core.parallel.recipes.recipe import (
    NVFP4,
    DelayedScaling,
    Recipe,
    check_recipe,
)
from megablocks_core.parallel.recipes.rounding import Chances, Columns, Rounding, amaxes_of
from megablocks_core.parallel.recipes.state import DelayedState, DrawState, State


class Engine(NamedTuple):
    """What computes: how operands are rounded, and the product of two of them.

    Attributes:
        over_columns: A matrix, by its rounding, for a product that sums over its columns.
        over_rows: The same for one that sums over its rows.
        product: Of two matrices that these gave, or of wide ones.
    """

    over_columns: Callable[[Rounding, Tensor], Any]
    over_rows: Callable[[Rounding, Tensor], Any]
    product: Callable[[Any, Any], Tensor]


def emulated_linear(
    x: Tensor,
    weight: Tensor,
    *,
    recipe: Recipe,
    state: State | None = None,
    amax_group: Group = LOCAL,
    columns: Columns | None = None,
    engine: Engine | None = None,
) -> Tensor:
    """``x W^T`` of rounded operands, and in backward both products of rounded ones.

    Maps ``x`` [... T I] and ``weight`` [O I] to [... T O] in the dtype of ``x``. Sums are taken in
    float32, in float64 of float64 operands. Where scales are those of whole tensors, their amaxes
    are reduced over ``amax_group``: one message of a few floats forward and one backward. Saved
    for backward: ``x`` and ``weight`` as they came.

    Args:
        x: The input.
        weight: The weight, or this rank's share of it.
        recipe: How operands are rounded.
        state: What ``state_for(recipe)`` gave; a step changes it, where gradients are on.
        amax_group: The ranks whose shares are one tensor.
        columns: Which of the whole's output features these are; default all.
        engine: What computes; default plain products of the wide values.

    Raises:
        ValueError: ``recipe`` is none, or needs a ``state`` that is not here.
    """
    check_recipe("recipe", recipe)
    if isinstance(recipe, DelayedScaling) and not isinstance(state, DelayedState):
        raise ValueError(f"state={state} of {recipe} must be a DelayedState")
    by_chance = isinstance(recipe, NVFP4) and recipe.stochastic_rounding
    if by_chance and not isinstance(state, DrawState):
        raise ValueError(f"state={state} of {recipe} must be a DrawState")
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    plan = _Plan(recipe, state, amax_group, columns, engine or PLAIN)
    scales = plan.forward_scales(x.detach(), weight.detach())
    return _Products.apply(x, weight, plan, scales)  # type: ignore[no-any-return]


class _Plan(NamedTuple):
    """What the products of a layer are told."""

    recipe: Recipe
    state: State | None
    group: Group
    columns: Columns | None
    engine: Engine

    def forward_scales(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """What ``Rounding`` takes, for the input and then the weight.

        Decided once where a region runs again in backward: a step must not count twice.
        """
        recipe, state = self.recipe, self.state
        amaxes = [*amaxes_of(_rows(x), recipe, "input"), *amaxes_of(weight, recipe, "weight")]
        if not amaxes:
            return None
        steps = torch.is_grad_enabled()

        def decide() -> Tensor:
            if not isinstance(state, DelayedState):
                return self._largest(amaxes)
            if not steps:
                return state.scale_fwd[:2].clone()
            return state.step_forward(self._largest(amaxes))

        return remember(decide)

    def forward_roundings(self, scales: Tensor | None) -> tuple[Rounding, Rounding]:
        """Those of the input and of the weight."""
        first, last = (None, None) if scales is None else (scales[:-1], scales[-1:])
        return Rounding(self.recipe, "input", first), Rounding(self.recipe, "weight", last)

    def gradient_rounding(self, dy: Tensor) -> Rounding:
        """That of the gradient, which counts as a step of backward."""
        amaxes, chances = amaxes_of(dy, self.recipe, "gradient"), None
        scales = self._largest(amaxes) if amaxes else None
        if isinstance(self.state, DelayedState) and scales is not None:
            scales = self.state.step_backward(scales)
        if isinstance(self.state, DrawState):
            chances = Chances(self.state.key, self.state.draw(), self.columns)
        return Rounding(self.recipe, "gradient", scales, chances)

    def _largest(self, amaxes: list[Tensor]) -> Tensor:
        """The amaxes of all ranks: one message."""
        own = torch.stack(amaxes)
        alone = isinstance(self.recipe, DelayedScaling) and not self.recipe.reduce_amax
        return own if alone else self.group.all_reduce(own, op="max")


class _Products(torch.autograd.Function):
    """The forward product, and both of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: _Plan, scales: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, scales)
        ctx.plan = plan
        rounds_x, rounds_weight = plan.forward_roundings(scales)
        over_columns, _, product = plan.engine
        y = product(over_columns(rounds_x, _rows(x)), over_columns(rounds_weight, weight).t())
        return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        rounds_x, rounds_weight = ctx.plan.forward_roundings(scales)
        over_columns, over_rows, product = ctx.plan.engine
        how = getattr(ctx.plan.recipe, "backward", "quantized")
        dy, x_rows, dtype = _rows(dys[0]), _rows(x), weight.dtype
        if how == "quantized":
            rounds_dy = ctx.plan.gradient_rounding(dy)
            dy_over_o, dy_over_t = over_columns(rounds_dy, dy), over_rows(rounds_dy, dy)
            weight, x_rows = over_rows(rounds_weight, weight), over_rows(rounds_x, x_rows)
        else:
            dy_over_o = dy_over_t = wide(dy)
            if how == "dequantized":
                weight = over_columns(rounds_weight, weight)
                x_rows = over_columns(rounds_x, x_rows)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = product(dy_over_o, weight).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = product(dy_over_t.t(), x_rows).to(dtype)
        return dx, dweight, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` in the wider dtype of the two, which a surrounding autocast leaves alone."""
    dtype = torch.promote_types(wide(a).dtype, wide(b).dtype)
    with torch.autocast(a.device.type, enabled=False):
        return a.to(dtype) @ b.to(dtype)


PLAIN = Engine(Rounding.over_columns, Rounding.over_rows, _product)
