"""The parameters of the experts of one rank, and how a form is asked to use them.

Dimensions: e experts here, i features here, H hidden size.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from megablocks_core.layers.moe.experts.activations import Activation

Weigh = Literal["hidden", "input", "output"]


class Projections(NamedTuple):
    """Stacked weights and biases.

    Attributes:
        gate: [e i H], of a gated activation.
        up: [e i H].
        down: [e H i].
        gate_bias: [e i].
        up_bias: [e i].
        down_bias: [e H].
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Projections":
        """All of them changed by a function."""
        changed: list[Any] = [None if tensor is None else change(tensor) for tensor in self]
        return Projections(*changed)

    def unstacked(self) -> "list[Projections]":
        """Those of each expert."""
        stacks = [None if tensor is None else tensor.unbind(0) for tensor in self]
        experts: list[list[Any]] = [
            [None if stack is None else stack[expert] for stack in stacks]
            for expert in range(self.up.shape[0])
        ]
        return [Projections(*expert) for expert in experts]


class Formula(NamedTuple):
    """What an expert computes.

    Attributes:
        activation: Between its projections.
        weigh: What a place's weight multiplies: the hidden activation, the expert's input, or
            its output. The first and the last differ in rounding alone.
    """

    activation: Activation
    weigh: Weigh
