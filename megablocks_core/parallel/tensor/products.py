"""Products of one input with several weights, whose messages fly while products run.

What column-parallel layers compute over several ranks (Megatron-LM,
https://arxiv.org/abs/1909.08053, section 3; under sequence parallelism
https://arxiv.org/abs/2205.05198, section 4.2), as one autograd function.

Dimensions: T tokens, t this rank's tokens, I input features, o this rank's output features.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from megablocks_core.groups import Group
from megablocks_core.groups.messages import (
    finish_all_gather,
    finish_reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)


def column_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    group: Group,
    sequence_parallel: bool,
) -> tuple[Tensor, ...]:
    """``x W^T + b`` for each weight [o I] and bias [o], of ``x`` [... T I] that all ranks share.

    Forward sends nothing; backward all-reduces the summed gradient of ``x`` while the
    gradients of the weights are computed. Under sequence parallelism ``x`` is [... t I], t
    equal on all ranks: forward all-gathers it, backward gathers it again, for the weights,
    and reduce-scatters its gradient. Saved for backward: ``x`` as it came, unless all weights
    are frozen, and the parameters themselves. A second derivative raises.

    Raises:
        ValueError: ``x`` has no dimension of tokens under sequence parallelism.
    """
    if sequence_parallel and x.dim() < 2:
        raise ValueError(
            f"x of shape {tuple(x.shape)} must have tokens along dim -2 under sequence parallelism"
        )
    return _Products.apply(x, _Wire(group, sequence_parallel), *weights, *biases)


class _Wire(NamedTuple):
    """What a fused product sends, and over which ranks."""

    group: Group
    sequence_parallel: bool

    def sizes(self, x: Tensor) -> list[int]:
        return [x.shape[-2]] * self.group.size


class _Products(torch.autograd.Function):
    """Products of one input with several weights; messages fly while products run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: _Wire, *weights_and_biases: Any) -> tuple[Tensor, ...]:
        count = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.wire, ctx.x_shape, ctx.x_dtype = wire, x.shape, x.dtype
        needs_x = any(ctx.needs_input_grad[2 : 2 + count])
        ctx.save_for_backward(x if needs_x else None, *weights_and_biases)
        if wire.sequence_parallel:
            sizes = wire.sizes(x)
            flying = start_all_gather(x, dim=-2, group=wire.group, sizes=sizes)
            x = finish_all_gather(flying, dim=-2, sizes=sizes)
        return tuple(linear(x, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights_and_biases = ctx.saved_tensors
        wire, count = ctx.wire, len(dys)
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        needs_dx, _, *needs = ctx.needs_input_grad
        gathers = wire.sequence_parallel and any(needs[:count])
        if gathers:
            sizes = wire.sizes(x)
            flying_x = start_all_gather(x, dim=-2, group=wire.group, sizes=sizes)
        if needs_dx:
            flying_dx = _start_input_gradient(_input_gradient(dys, weights), wire)
        if gathers:
            x = finish_all_gather(flying_x, dim=-2, sizes=sizes)
        dws = [
            _weight_gradient(dy, x).to(weight.dtype) if needed else None
            for dy, weight, needed in zip(dys, weights, needs[:count], strict=True)
        ]
        dbs = [
            _rows(dy).sum(0).to(bias.dtype) if needed else None
            for dy, bias, needed in zip(dys, biases, needs[count:], strict=True)
        ]
        dx = _finish_input_gradient(flying_dx, wire, ctx) if needs_dx else None
        return dx, None, *dws, *dbs


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _input_gradient(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of ``dy W``, added up in one buffer."""
    dx = _rows(dys[0]) @ weights[0].to(dys[0].dtype)
    for dy, weight in zip(dys[1:], weights[1:], strict=True):
        dx.addmm_(_rows(dy), weight.to(dy.dtype))
    return dx.view(*dys[0].shape[:-1], dx.shape[-1])


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return _rows(dy).t() @ _rows(x).to(dy.dtype)


def _start_input_gradient(dx: Tensor, wire: _Wire) -> Tensor:
    if not wire.sequence_parallel:
        return start_all_reduce(dx, group=wire.group)
    sizes = [dx.shape[-2] // wire.group.size] * wire.group.size
    return start_reduce_scatter(dx, dim=-2, group=wire.group, sizes=sizes)


def _finish_input_gradient(flying: Tensor, wire: _Wire, ctx: Any) -> Tensor:
    if not wire.sequence_parallel:
        return wait(flying).to(ctx.x_dtype)
    sizes = [ctx.x_shape[-2]] * wire.group.size
    dx = finish_reduce_scatter(flying, dim=-2, group=wire.group, sizes=sizes)
    return dx.to(ctx.x_dtype)
