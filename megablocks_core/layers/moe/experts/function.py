"""Experts as one step of autograd, so that it is known what is kept for backward.

Kept are the tokens, the outputs of ``gate_proj`` and ``up_proj``, the weights of the places, and
integers: never a result of an expert, nor a permuted copy of the tokens. The gradient of a
place's weight is the inner product of the hidden activation, which is computed again, and its
gradient.

Dimensions: M rows, N places, H hidden size, e experts here, i features here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.experts.inverse import Inverse, inverse_of, sum_inverse
from megablocks_core.layers.moe.experts.memory import Memory
from megablocks_core.layers.moe.experts.projections import Formula, Projections


class Inputs(NamedTuple):
    """What experts read.

    Attributes:
        x: Tokens [M H].
        rows: Which of them each place reads [N], -1 where it is empty.
        weights: Of the places [N].
        bounds: Integers of the device that a computation wants besides, such as offsets.
        formula: What experts compute.
    """

    x: Tensor
    rows: Tensor
    weights: Tensor
    bounds: Tensor | None
    formula: Formula


class Outputs(NamedTuple):
    """What forward makes.

    Attributes:
        y: Weighted results [N H].
        gate: The output of ``gate_proj`` and its bias [N i].
        up: The output of ``up_proj`` and its bias [N i].
    """

    y: Tensor
    gate: Tensor | None
    up: Tensor


class Gradients(NamedTuple):
    """What backward makes.

    Attributes:
        x: Of each place's token [N H], anything in empty places.
        weights: Of the places [N].
        projections: Of those that are wanted and were not accumulated already.
    """

    x: Tensor | None
    weights: Tensor
    projections: Sequence[Tensor | None]


class Computation(Protocol):
    """How products of rows and experts' matrices are taken."""

    def forward(self, inputs: Inputs, projections: Projections) -> Outputs:
        """Results and what backward wants to see again."""
        ...

    def backward(
        self,
        dy_NH: Tensor,
        inputs: Inputs,
        outputs: Outputs,
        projections: Projections,
        wanted: "Wanted",
    ) -> Gradients:
        """Gradients; ``outputs.y`` is not there any more."""
        ...


class Wanted(NamedTuple):
    """Which gradients are to be computed.

    Attributes:
        x: That of the tokens.
        projections: Those of the projections.
        into: The gradient that each of these is added to, in place, instead of being returned.
    """

    x: bool
    projections: list[bool]
    into: list[Tensor | None]

    def to_return(self, projections: Projections, memory: Memory) -> list[Tensor | None]:
        """Uninitialised gradients of the projections, those that are to be returned."""
        parameters = zip(projections, self.projections, self.into, strict=True)
        return [
            memory.tensor(f"gradient {index}", parameter, *parameter.shape)
            if parameter is not None and is_wanted and into is None
            else None
            for index, (parameter, is_wanted, into) in enumerate(parameters)
        ]


def run(
    computation: Computation,
    dispatched: Dispatched,
    projections: Projections,
    formula: Formula,
    *,
    bounds: Tensor | None = None,
    persistent: bool = False,
) -> Tensor:
    """Weighted results of the experts [N H].

    Args:
        computation: How products are taken.
        dispatched: The tokens.
        projections: The parameters.
        formula: What experts compute.
        bounds: Integers of the device that the computation wants.
        persistent: Backward adds gradients of parameters to ``.grad`` itself, where there is one.
    """
    inverse = inverse_of(dispatched)
    inputs = Inputs(dispatched.x, dispatched.rows, dispatched.weights, bounds, formula)
    return _Experts.apply(computation, persistent, inverse, formula, *inputs[:4], *projections)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        computation: Computation,
        persistent: bool,
        inverse: Inverse,
        formula: Formula,
        x: Tensor,
        rows: Tensor,
        weights: Tensor,
        bounds: Tensor | None,
        *held: Tensor | None,
    ) -> Tensor:
        projections = Projections(*held)  # pyright: ignore[reportArgumentType]
        inputs = Inputs(x, rows, weights, bounds, formula)
        outputs = computation.forward(inputs, projections)
        ctx.computation, ctx.persistent, ctx.formula = computation, persistent, formula
        ctx.save_for_backward(
            x, rows, weights, bounds, *inverse, outputs.gate, outputs.up, *projections
        )
        return outputs.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Any, ...]:
        x, rows, weights, bounds, places, lengths, gate, up, *held = ctx.saved_tensors
        projections = Projections(*held)
        wants_x, wants_projections = ctx.needs_input_grad[4], list(ctx.needs_input_grad[8:])
        into = [
            gradient_of(parameter) if ctx.persistent and is_wanted else None
            for parameter, is_wanted in zip(projections, wants_projections, strict=True)
        ]
        gradients = ctx.computation.backward(
            dy_NH.contiguous(),
            Inputs(x, rows, weights, bounds, ctx.formula),
            Outputs(dy_NH, gate, up),
            projections,
            Wanted(wants_x, wants_projections, into),
        )
        dx = None if gradients.x is None else sum_inverse(gradients.x, Inverse(places, lengths))
        own = (None,) * 4
        return *own, dx, None, gradients.weights, None, *gradients.projections


def gradient_of(parameter: Tensor | None) -> Tensor | None:
    """The gradient that backward may add to by itself.

    ``None`` if there is none yet, if the tensor is no leaf, if hooks wait for its gradient, or it
    is of another kind.
    """
    if parameter is None or parameter.grad is None:
        return None
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    if not parameter.is_leaf or hooks or torch.is_grad_enabled():
        return None
    grad = parameter.grad
    fits = grad.layout == torch.strided and grad.dtype == parameter.dtype and grad.is_contiguous()
    return grad if fits else None
