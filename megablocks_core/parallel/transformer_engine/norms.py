"""Norms computed by Transformer Engine, with the parameters of ours."""

from typing import Literal

import torch
from torch import Tensor, nn

from megablocks_core.parallel.transformer_engine.engine import Engine

Normalization = Literal["rms", "layer"]


def rms_norm(
    hidden_size: int,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> "Norm":
    """``transformer_engine.pytorch.RMSNorm``, for every ``norm=``; ``layers.RMSNorm`` says what.

    Args:
        hidden_size: Of the last dimension.
        eps: Added under the root.
        zero_centered: ``1 + weight`` takes the place of ``weight``.
        device: Of the parameter.
        dtype: Of the parameter.

    Raises:
        ImportError: Transformer Engine is missing.
    """
    options = {"zero_centered": zero_centered, "device": device, "dtype": dtype}
    return Norm("RMSNorm", hidden_size, eps=eps, **options)


def layer_norm(
    hidden_size: int,
    *,
    eps: float = 1e-5,
    zero_centered: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> "Norm":
    """``transformer_engine.pytorch.LayerNorm``; ``layers.LayerNorm`` says what.

    Args:
        hidden_size: Of the last dimension.
        eps: Added to the variance.
        zero_centered: ``1 + weight`` takes the place of ``weight``.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ImportError: Transformer Engine is missing.
    """
    options = {"zero_centered": zero_centered, "device": device, "dtype": dtype}
    return Norm("LayerNorm", hidden_size, eps=eps, **options)


class NormWeights(nn.Module):
    """The parameters of a norm."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        *,
        with_bias: bool,
        zero_centered: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if with_bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Set what features are multiplied by to one and the bias to zero, whatever the seed."""
        self.weight.fill_(0 if self.zero_centered else 1)
        if self.bias is not None:
            self.bias.zero_()


class Norm(NormWeights):
    """What ``rms_norm`` and ``layer_norm`` build; on a part of the tokens use ``on_part``."""

    def __init__(
        self,
        kind: str,
        hidden_size: int,
        *,
        eps: float,
        zero_centered: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(
            hidden_size,
            with_bias=kind == "LayerNorm",
            zero_centered=zero_centered,
            device=device,
            dtype=dtype,
        )
        self.eps = eps
        options = {"eps": eps, "zero_centered_gamma": zero_centered, "dtype": self.weight.dtype}
        self.engine = Engine(kind, (hidden_size,), options)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Normalise the last dimension."""
        parameters = {"weight": self.weight}
        if self.bias is not None:
            parameters["bias"] = self.bias
        return self.engine(parameters, x_TH)

    def extra_repr(self) -> str:
        """Kind, size and eps."""
        return f"{self.engine.kind}, {self.weight.shape[0]}, eps={self.eps}"
