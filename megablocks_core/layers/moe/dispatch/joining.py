"""Every rank joins every message of backward, whatever has a gradient or is used on it.

A message that one rank sends back and another does not makes the first wait for ever. So what goes
into messages has a graph on every rank, and what came out of them is tied to what goes back.
"""

from typing import Any

import torch
from torch import Tensor


def with_graph(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, which have a graph wherever gradients are on, and zero ones if idle.

    In compiled code they are as they are: there ranks must agree on what needs a gradient.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return tensors
    leaf = torch.zeros(0, device=tensors[0].device, requires_grad=True)
    return _Rooted.apply(leaf, *tensors)


def link_to(*tensors: Tensor) -> Tensor:
    """An empty tensor that stands for these in ``tied``, without holding their memory."""
    return _Link.apply(*tensors)


def tied(y: Tensor, link: Tensor) -> Tensor:
    """``y``, whose backward comes to the tensors behind ``link`` even if ``y`` came from none."""
    return _Tied.apply(y, link)


class _Rooted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *grads


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        # No gradient, and no zeros either: it is the visit that counts.
        return (None,) * ctx.count


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, link: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, dy.new_empty(0)
