"""Autograd around a loss that computes its gradients itself, a chunk of tokens at a time.

Dimensions: T tokens (any number of dimensions).
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import GroupName

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.chunked_head import Gradients, Wanted

# Rows of a gradient that are scaled and rounded at a time.
_ROWS = 4096


class Job(Protocol):
    """All that a loss takes beside the tensors that may have gradients."""

    def run(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        wanted: Wanted,
    ) -> tuple[Tensor, Gradients]:
        """Losses [T], and the gradients of their sum or of ``scale`` times them."""
        ...


def wanted(*tensors: Tensor | None) -> Wanted:
    """Which of hidden, weight and bias need a gradient."""
    enabled = torch.is_grad_enabled()
    return Wanted(*(enabled and x is not None and x.requires_grad for x in tensors))


def total_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> Tensor:
    """The sum of the losses; gradients are computed along with them."""
    return _Total.apply(hidden, weight, bias, job, wanted(hidden, weight, bias))


def token_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> Tensor:
    """The losses [T]; backward computes the logits again."""
    return _PerToken.apply(hidden, weight, bias, job)


def group_named(name: str) -> Group:
    """The group whose process group torch's functional collectives know by ``name``."""
    return Group.of(_resolve_process_group(GroupName(name))) if name else LOCAL


class _Total(torch.autograd.Function):
    """The sum of losses. Its first backward hands out the gradients that forward computed."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job, wanted: Wanted
    ) -> Tensor:
        losses_T, gradients = job.run(hidden, weight, bias, None, wanted)
        ctx.job, ctx.wanted, ctx.gradients = job, wanted, gradients
        ctx.save_for_backward(hidden, weight, bias)
        return losses_T.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        # They are scaled in place and then the caller's: a backward after that starts anew.
        gradients, ctx.gradients = ctx.gradients, None
        hidden, weight, bias = ctx.saved_tensors
        if gradients is None:
            _, gradients = ctx.job.run(hidden, weight, bias, None, ctx.wanted)
        dhidden, dweight, dbias = gradients
        if dhidden is not None:
            dhidden.mul_(dtotal)
        dweight, dbias = _scaled(dweight, dtotal, weight), _scaled(dbias, dtotal, bias)
        return dhidden, dweight, dbias, None, None


class _PerToken(torch.autograd.Function):
    """Each token's loss; nothing but the inputs is saved."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> Tensor:
        losses_T, _ = job.run(hidden, weight, bias, None, Wanted(False, False, False))
        ctx.job = job
        ctx.save_for_backward(hidden, weight, bias)
        return losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        wanted = Wanted(*ctx.needs_input_grad[:3])
        _, gradients = ctx.job.run(hidden, weight, bias, dlosses_T, wanted)
        dhidden, dweight, dbias = gradients
        one = dlosses_T.new_ones(())
        return dhidden, _scaled(dweight, one, weight), _scaled(dbias, one, bias), None


def _scaled(gradient: Tensor | None, scale: Tensor, like: Tensor | None) -> Tensor | None:
    """``gradient`` times ``scale`` in the dtype of ``like``; in place if that is its own."""
    if gradient is None or like is None:
        return None
    if gradient.dtype == like.dtype:
        return gradient.mul_(scale)
    result = torch.empty_like(like)
    for part, source in zip(result.split(_ROWS), gradient.split(_ROWS), strict=True):
        part.copy_(source * scale)
    return result
