"""A loss that travels with an activation, for trainers that can return no second value."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def attach_loss(y: Tensor, loss: Tensor, *, scale: float | Tensor) -> Tensor:
    """``y`` itself; its backward also runs that of ``scale * loss``.

    Once for each backward through ``y``, also in a recomputed region, and not at all where nothing
    that is differentiated depends on ``y``. ``scale`` is whatever else multiplies the main loss:
    coefficient, 1 / micro-batches, a scaler's factor. Nothing is sent, and nothing kept: with a
    scale of 0, or without gradients, ``loss`` is let go.

    Args:
        y: Any activation on the way to the main loss.
        loss: Without dimensions.
        scale: Of its gradient; a number or a tensor without dimensions.

    Raises:
        ValueError: ``loss`` has dimensions.
    """
    if loss.dim():
        raise ValueError(f"loss of shape {list(loss.shape)} must have no dimensions")
    if not isinstance(scale, Tensor) and scale == 0:
        return y
    return _Attach.apply(y, scale * loss)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, torch.ones((), dtype=ctx.dtype, device=ctx.device)
