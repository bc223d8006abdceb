"""What experts apply between their projections, with its derivative in closed form.

Dimensions: N rows, F features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from math import inf

import torch
from torch import Tensor
from torch.nn import functional as F

Inner = Callable[[Tensor], Tensor]
InnerBackward = Callable[[Tensor, Tensor], Tensor]

_aten = torch.ops.aten


class Activation(ABC):
    """From the outputs of ``gate_proj``, if ``gated``, and ``up_proj`` to the hidden activation.

    Attributes:
        gated: Whether it takes a gate.
        swiglu: The numbers alpha, limit and shift, if it is ``(up + shift) * gate *
            sigmoid(alpha * gate)`` of clamped gate and up, as ``ClampedSwiGLU`` says.
    """

    gated: bool
    swiglu: tuple[float, float, float] | None = None

    @abstractmethod
    def forward(self, gate_NF: Tensor | None, up_NF: Tensor) -> Tensor:
        """The hidden activation [N F]."""

    @abstractmethod
    def backward(
        self, dh_NF: Tensor, gate_NF: Tensor | None, up_NF: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of gate and up [N F], from that of the hidden activation."""


class Plain(Activation):
    """``inner(up)``."""

    gated = False

    def __init__(self, inner: Inner, inner_backward: InnerBackward) -> None:
        self._inner, self._inner_backward = inner, inner_backward

    def forward(self, gate_NF: Tensor | None, up_NF: Tensor) -> Tensor:
        """The hidden activation [N F]."""
        return self._inner(up_NF)

    def backward(
        self, dh_NF: Tensor, gate_NF: Tensor | None, up_NF: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """No gradient, and that of up [N F]."""
        return None, self._inner_backward(dh_NF, up_NF)


class Gated(Activation):
    """``inner(gate) * up`` (https://arxiv.org/abs/2002.05202)."""

    gated = True

    def __init__(self, inner: Inner, inner_backward: InnerBackward) -> None:
        self._inner, self._inner_backward = inner, inner_backward
        if inner is F.silu:
            self.swiglu = (1.0, inf, 0.0)

    def forward(self, gate_NF: Tensor | None, up_NF: Tensor) -> Tensor:
        """The hidden activation [N F]."""
        assert gate_NF is not None
        return self._inner(gate_NF) * up_NF

    def backward(
        self, dh_NF: Tensor, gate_NF: Tensor | None, up_NF: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of gate and up [N F]."""
        assert gate_NF is not None
        return self._inner_backward(dh_NF * up_NF, gate_NF), dh_NF * self._inner(gate_NF)


class ClampedSwiGLU(Activation):
    """GPT-OSS's ``(up + 1) * gate * sigmoid(alpha * gate)``.

    ``gate`` is first clamped from above and ``up`` from both sides to ``limit``.
    """

    gated = True

    def __init__(self, *, alpha: float = 1.702, limit: float = 7.0) -> None:
        self._alpha, self._limit = alpha, limit
        self.swiglu = (alpha, limit, 1.0)

    def forward(self, gate_NF: Tensor | None, up_NF: Tensor) -> Tensor:
        """The hidden activation [N F]."""
        assert gate_NF is not None
        gate_NF = gate_NF.clamp(max=self._limit)
        up_NF = up_NF.clamp(-self._limit, self._limit)
        return (up_NF + 1) * (gate_NF * torch.sigmoid(self._alpha * gate_NF))

    def backward(
        self, dh_NF: Tensor, gate_NF: Tensor | None, up_NF: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of gate and up [N F]; none flows where they were clamped."""
        assert gate_NF is not None
        gate, up = gate_NF.clamp(max=self._limit), up_NF.clamp(-self._limit, self._limit)
        sigmoid = torch.sigmoid(self._alpha * gate)
        slope = sigmoid * (1 + self._alpha * gate * (1 - sigmoid))
        dgate = torch.where(gate_NF <= self._limit, dh_NF * (up + 1) * slope, 0.0)
        inside = (up_NF >= -self._limit) & (up_NF <= self._limit)
        return dgate, torch.where(inside, dh_NF * gate * sigmoid, 0.0)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _relu_squared_backward(dy: Tensor, x: Tensor) -> Tensor:
    return dy * (2 * F.relu(x))


def _relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return _aten.threshold_backward(dy, x, 0)


_SILU = (F.silu, _aten.silu_backward)
_GELU = (F.gelu, _aten.gelu_backward)
_GELU_TANH = (
    partial(F.gelu, approximate="tanh"),
    partial(_aten.gelu_backward, approximate="tanh"),
)

# ``relu2`` is squared ReLU (https://arxiv.org/abs/2109.08668).
ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Gated(*_SILU),
    "geglu": Gated(*_GELU),
    "geglu_tanh": Gated(*_GELU_TANH),
    "clamped_swiglu": ClampedSwiGLU(),
    "silu": Plain(*_SILU),
    "gelu": Plain(*_GELU),
    "gelu_tanh": Plain(*_GELU_TANH),
    "relu": Plain(F.relu, _relu_backward),
    "relu2": Plain(_relu_squared, _relu_squared_backward),
}
