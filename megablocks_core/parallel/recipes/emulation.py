"""The three products of linear layers with rounded operands, in plain torch on any device.

What low-precision hardware computes, but for the order of sums: operands are rounded to numbers
and factors, and multiplied as the wide values that those stand for. Rounding runs along the
dimension that a product sums over, so the input, the weight and the gradient of the output are
each rounded twice where blocks are lines.

Dimensions: T tokens, N rows of all experts, e experts, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.groups import LOCAL, Group
from megablocks_core.numbers.formats import wide
from megablocks_core.parallel.checks import check_floating
from megablocks_core.parallel.counter import bits_of
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
        ValueError: ``recipe`` is none, or needs a ``state`` that is not here; or ``x`` has no
            floating-point numbers.
    """
    x, weight = _operands(x, weight)
    y = _products(
        _rows(x),
        weight.unsqueeze(0),
        _Plan(recipe, state, amax_group, columns, engine or PLAIN),
    )
    return y.view(*x.shape[:-1], weight.shape[0])


def emulated_grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int],
    *,
    recipe: Recipe,
    state: State | None = None,
    amax_group: Group = LOCAL,
    columns: Columns | None = None,
    numbers: Sequence[int] | None = None,
) -> Tensor:
    """``emulated_linear`` of many experts, each with its own rows, weight and scales.

    Maps ``x`` [N I], one expert's rows after the other's, and ``weight`` [e O I] to [N O]. Blocks
    of an expert start with its first row. One message of a few floats an expert forward and one
    backward, where scales are those of whole tensors.

    Args:
        x: The input.
        weight: The experts' weights, or this rank's share of them.
        counts: How many rows each expert has [e].
        recipe: How operands are rounded.
        state: What ``state_for(recipe, num_products=e)`` gave.
        amax_group: The ranks with copies or shares of the same experts.
        columns: Which of the whole's output features these are; default all.
        numbers: Of the experts among all, by which chances are told apart; default from 0.

    Raises:
        ValueError: As of ``emulated_linear``; or counts are not those of the rows and experts.
    """
    counts = tuple(int(count) for count in counts)
    if len(counts) != len(weight) or sum(counts) != len(x) or min(counts, default=0) < 0:
        raise ValueError(f"counts={counts} must be {len(weight)} numbers with sum {len(x)}")
    numbers = tuple(range(len(weight)) if numbers is None else numbers)
    x, weight = _operands(x, weight)
    plan = _Plan(recipe, state, amax_group, columns, PLAIN, counts, numbers)
    return _products(x, weight, plan)


def _operands(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both as autocast wants them."""
    check_floating("x.dtype", x.dtype)
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype)


class _Plan(NamedTuple):
    """What the products of a layer are told.

    Attributes:
        counts: Rows of each product, one product's after the other's; ``None``: there is one.
        numbers: Of the products among those of all ranks.
    """

    recipe: Recipe
    state: State | None
    group: Group
    columns: Columns | None
    engine: Engine
    counts: tuple[int, ...] | None = None
    numbers: tuple[int, ...] | None = None

    def check(self) -> None:
        """Raise unless the recipe is one and has the state that it needs."""
        recipe, state = self.recipe, self.state
        check_recipe("recipe", recipe)
        if isinstance(recipe, DelayedScaling) and not isinstance(state, DelayedState):
            raise ValueError(f"state={state} of {recipe} must be a DelayedState")
        by_chance = isinstance(recipe, NVFP4) and recipe.stochastic_rounding
        if by_chance and not isinstance(state, DrawState):
            raise ValueError(f"state={state} of {recipe} must be a DrawState")

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """The rows of each product."""
        return [x] if self.counts is None else x.split(self.counts)

    def forward_scales(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """What ``Rounding`` takes, for the input and then the weight, of each product.

        Decided once where a region runs again in backward: a step must not count twice.
        """
        recipe, state = self.recipe, self.state
        amaxes = [
            [*amaxes_of(rows, recipe, "input"), *amaxes_of(matrix, recipe, "weight")]
            for rows, matrix in zip(self.parts(x), weight.unbind(), strict=True)
        ]
        if not any(amaxes):
            return None
        steps = torch.is_grad_enabled()

        def decide() -> Tensor:
            if not isinstance(state, DelayedState):
                return self._largest(amaxes)
            return state.step_forward(self._largest(amaxes)) if steps else state.forward_scales()

        return remember(decide)

    def forward_roundings(self, scales: Tensor | None) -> list[tuple[Rounding, Rounding]]:
        """Those of the input and of the weight, of each product."""
        count = 1 if self.counts is None else len(self.counts)
        rows = [None] * count if scales is None else scales.unbind()
        return [
            (
                Rounding(self.recipe, "input", None if row is None else row[:-1]),
                Rounding(self.recipe, "weight", None if row is None else row[-1:]),
            )
            for row in rows
        ]

    def gradient_roundings(self, dy: Tensor) -> list[Rounding]:
        """Those of the gradient, which counts as a step of backward."""
        parts = self.parts(dy)
        amaxes = [amaxes_of(part, self.recipe, "gradient") for part in parts]
        scales = self._largest(amaxes) if any(amaxes) else None
        if isinstance(self.state, DelayedState) and scales is not None:
            scales = self.state.step_backward(scales)
        rows = [None] * len(parts) if scales is None else scales.unbind()
        return [
            Rounding(self.recipe, "gradient", row, chances)
            for row, chances in zip(rows, self._chances(len(parts)), strict=True)
        ]

    def _chances(self, count: int) -> list[Chances | None]:
        if not isinstance(self.state, DrawState):
            return [None] * count
        key, draw = self.state.key, self.state.draw()
        keys = [key] if self.numbers is None else [bits_of(key, number) for number in self.numbers]
        return [Chances(key, draw, self.columns) for key in keys]

    def _largest(self, amaxes: list[list[Tensor]]) -> Tensor:
        """The amaxes of all ranks: one message."""
        own = torch.stack([torch.stack(each) for each in amaxes])
        alone = isinstance(self.recipe, DelayedScaling) and not self.recipe.reduce_amax
        return own if alone else self.group.all_reduce(own, op="max")


def _products(x: Tensor, weight: Tensor, plan: _Plan) -> Tensor:
    plan.check()
    scales = plan.forward_scales(x.detach(), weight.detach())
    return _Products.apply(x, weight, plan, scales)  # type: ignore[no-any-return]


class _Products(torch.autograd.Function):
    """The forward product, and both of backward, of each expert: x [N I] and weight [e O I]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: _Plan, scales: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, scales)
        ctx.plan = plan
        over_columns, _, product = plan.engine
        return _joined(
            product(over_columns(of_x, rows), over_columns(of_weight, matrix).t()).to(x.dtype)
            for rows, matrix, (of_x, of_weight) in zip(
                plan.parts(x), weight.unbind(), plan.forward_roundings(scales), strict=True
            )
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        plan, (dy,) = ctx.plan, dys
        how = getattr(plan.recipe, "backward", "quantized")
        of_dys = plan.gradient_roundings(dy) if how == "quantized" else [None] * len(weight)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dxs, dweights = [], []
        for rows, dy_rows, matrix, (of_x, of_weight), of_dy in zip(
            plan.parts(x),
            plan.parts(dy),
            weight.unbind(),
            plan.forward_roundings(scales),
            of_dys,
            strict=True,
        ):
            of = _Roundings(of_x, of_weight, of_dy)
            operands = _backward_operands(plan.engine, how, of, rows, matrix, dy_rows)
            product = plan.engine.product
            if wants_x:
                dxs.append(product(operands.dy_over_o, operands.weight).to(x.dtype))
            if wants_weight:
                dweights.append(product(operands.dy_over_t.t(), operands.x).to(weight.dtype))
        return (
            _joined(dxs) if wants_x else None,
            _joined([each.unsqueeze(0) for each in dweights]) if wants_weight else None,
            None,
            None,
        )


class _Roundings(NamedTuple):
    """Of a product's operands."""

    x: Rounding
    weight: Rounding
    dy: Rounding | None


class _Operands(NamedTuple):
    """What the products of backward multiply."""

    dy_over_o: Any
    dy_over_t: Any
    weight: Any
    x: Any


def _backward_operands(
    engine: Engine, how: str, of: _Roundings, x: Tensor, weight: Tensor, dy: Tensor
) -> _Operands:
    over_columns, over_rows, _ = engine
    if of.dy is not None:
        return _Operands(
            over_columns(of.dy, dy),
            over_rows(of.dy, dy),
            over_rows(of.weight, weight),
            over_rows(of.x, x),
        )
    if how == "dequantized":
        weight, x = over_columns(of.weight, weight), over_columns(of.x, x)
    return _Operands(wide(dy), wide(dy), weight, x)


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """The rows of all parts; a single part is not copied."""
    parts = list(parts)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` in the wider dtype of the two, which a surrounding autocast leaves alone."""
    dtype = torch.promote_types(wide(a).dtype, wide(b).dtype)
    with torch.autocast(a.device.type, enabled=False):
        return a.to(dtype) @ b.to(dtype)


PLAIN = Engine(Rounding.over_columns, Rounding.over_rows, _product)
