"""Noise on what a router reads (Switch Transformer, https://arxiv.org/abs/2101.03961, section 2.2).

Dimensions: T tokens, H features.
"""

from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.layers.moe.routers.words import check_words, stream_key, uniform


class Jitter(nn.Module):
    """In training, multiply each element by a value uniform in [1 - eps, 1 + eps).

    The values are a hash of the stream, of each token's word and of the feature: the same on any
    ranks, in any micro-batches and when a region is recomputed. In evaluation it is the identity.
    For backward it saves the words.

    Args:
        eps: From 0 to 1.
        stream: Name of the layer, which other layers must not have.

    Raises:
        ValueError: ``eps`` is not from 0 to 1, or ``stream`` is "".
    """

    def __init__(self, eps: float, *, stream: str) -> None:
        super().__init__()
        if not (isinstance(eps, Real) and 0 <= eps <= 1):
            raise ValueError(f"eps={eps!r} must be from 0 to 1")
        self.eps, self.stream, self.key = float(eps), stream, stream_key(stream)

    def forward(self, x_TH: Tensor, *, index: Tensor | None) -> Tensor:
        """Jitter the tokens.

        Args:
            x_TH: Tokens [T H].
            index: A word a token from ``DropoutKey.index`` [T]; needed in training alone.

        Raises:
            ValueError: ``index`` is missing, or is not int64 [T].
        """
        if not self.training or self.eps == 0:
            return x_TH
        if index is None:
            raise ValueError(
                f"index=None must be the words of DropoutKey.index, because {self.stream!r} "
                f"jitters in training with eps={self.eps}"
            )
        check_words(index, x_TH.shape[0])
        return _Jitter.apply(x_TH, index, self.eps, self.key)

    def extra_repr(self) -> str:
        """Width and stream."""
        return f"eps={self.eps}, stream={self.stream!r}"


class _Jitter(torch.autograd.Function):
    """Linear in ``x``, so backward is the same function of the gradient."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, eps: float, key: int) -> Tensor:
        values = uniform(index, key, x.shape[-1])
        return x * values.mul_(2 * eps).add_(1 - eps).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, ctx.eps, ctx.key = inputs
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return _Jitter.apply(dy, index, ctx.eps, ctx.key), None, None, None
