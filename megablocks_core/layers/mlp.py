"""Feed-forward layers (gated ones: Shazeer, https://arxiv.org/abs/2002.05202).

Dimensions: T tokens, H hidden size, F feed-forward size. A lowercase letter is this rank's
share of the capital one: f = F / tp.size.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megablocks_core.groups import LOCAL, Group, split_evenly
from megablocks_core.layers.linear import LinearFactory, apply_each, parallel_linear
from megablocks_core.parallel import Dropout


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


_gelu_tanh = partial(F.gelu, approximate="tanh")

# By the names of Hugging Face's configs.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu_squared,
}


class MLP(nn.Module):
    """``down_proj(activation(up_proj(x)))``.

    Maps ``x`` [... T H] to ``y`` [... T H]. Forward sends one all-reduce and backward one;
    under sequence parallelism ``x`` and ``y`` hold this rank's tokens, forward sends an
    all-gather and a reduce-scatter, and backward these two and the second gather of ``x``.

    Args:
        hidden_size: H.
        ffn_size: F.
        activation: A name of ``ACTIVATIONS``.
        bias: Add biases to both projections.
        dropout: Of what ``down_proj`` takes.
        sequence_parallel: The ranks hold equal slices of the tokens.
        linear: Builds the projections; default ``parallel_linear``, which see.
        tp: The tensor-parallel ranks.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: ``ffn_size`` does not divide evenly over ``tp``, or the activation is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        dropout: Dropout | None = None,
        sequence_parallel: bool = False,
        linear: LinearFactory | None = None,
        tp: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features = split_evenly(ffn_size, group=tp, name="ffn_size")
        self.dropout = dropout or Dropout(0.0)
        self.activation = _activation(activation)
        build = partial(
            linear or parallel_linear,
            bias=bias,
            sequence_parallel=sequence_parallel,
            group=tp,
            device=device,
            dtype=dtype,
        )
        self.up_proj = build(hidden_size, ffn_size, parallel_mode="column")
        self.down_proj = build(ffn_size, hidden_size, parallel_mode="row")

    def forward(self, x_TH: Tensor, *, dropout_index: Tensor | None = None) -> Tensor:
        """Apply the layer to every token.

        Args:
            x_TH: Input [... T H].
            dropout_index: ``DropoutKey.index`` of all T tokens [... T], if the layer drops.

        Raises:
            ValueError: The layer drops, and ``dropout_index`` is missing.
        """
        y_Tf = self.activation(self.up_proj(x_TH))
        first = self.features.start
        return self.down_proj(self.dropout(y_Tf, index=dropout_index, first_feature=first))


class GatedMLP(nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``: SwiGLU with ``silu``.

    Maps ``x`` [... T H] to ``y`` [... T H]. Gate and up share their messages, so it sends what
    ``MLP`` sends.

    Args:
        hidden_size: H.
        ffn_size: F.
        activation: A name of ``ACTIVATIONS``.
        bias: Add biases to all three projections.
        dropout: Of what ``down_proj`` takes.
        sequence_parallel: The ranks hold equal slices of the tokens.
        linear: Builds the projections; default ``parallel_linear``, which see.
        tp: The tensor-parallel ranks.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: ``ffn_size`` does not divide evenly over ``tp``, or the activation is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        dropout: Dropout | None = None,
        sequence_parallel: bool = False,
        linear: LinearFactory | None = None,
        tp: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features = split_evenly(ffn_size, group=tp, name="ffn_size")
        self.dropout = dropout or Dropout(0.0)
        self.activation = _activation(activation)
        build = partial(
            linear or parallel_linear,
            bias=bias,
            sequence_parallel=sequence_parallel,
            group=tp,
            device=device,
            dtype=dtype,
        )
        self.gate_proj = build(hidden_size, ffn_size, parallel_mode="column")
        self.up_proj = build(hidden_size, ffn_size, parallel_mode="column")
        self.down_proj = build(ffn_size, hidden_size, parallel_mode="row")

    def forward(self, x_TH: Tensor, *, dropout_index: Tensor | None = None) -> Tensor:
        """Apply the layer to every token, as ``MLP`` does."""
        gate_Tf, up_Tf = apply_each(x_TH, self.gate_proj, self.up_proj)
        y_Tf = self.activation(gate_Tf) * up_Tf
        first = self.features.start
        return self.down_proj(self.dropout(y_Tf, index=dropout_index, first_feature=first))


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
