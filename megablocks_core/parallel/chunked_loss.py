"""Autograd around a loss that computes its gradients itself, a chunk of tokens at a time.

Dimensions: T tokens (any number of dimensions).
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import GroupName

from megablocks_core.groups import LOCAL, Group, chunk_slice
from megablocks_core.parallel.head_gradients import Gradients, Wanted


class Job(Protocol):
    """All that a loss takes beside the tensors that may have gradients."""

    def run(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, wanted: Wanted
    ) -> tuple[Tensor, Gradients]:
        """Losses [T], and the gradients of their sum weighted by ``scale`` [T]."""
        ...


def total_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job, counts: Tensor, *, mean: bool
) -> Tensor:
    """The sum of the losses, or that over the number of tokens that count, if there are any.

    Gradients are computed along with it.
    """
    tensors = (hidden, weight, bias)
    enabled = torch.is_grad_enabled()
    wanted = Wanted(*(enabled and x is not None and x.requires_grad for x in tensors))
    one = counts.new_ones((), dtype=torch.float64)
    share = counts.sum().clamp(min=1).double().reciprocal() if mean else one
    if torch.float16 in (hidden.dtype, weight.dtype):
        # Gradients of a mean may be too small for float16 until the caller's loss scale is in.
        total = _Total.apply(*tensors, job, one, wanted)
        return total * share.to(total.dtype)
    return _Total.apply(*tensors, job, share, wanted)


def token_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job, counts: Tensor
) -> Tensor:
    """The losses [T]; backward computes the logits again."""
    return _PerToken.apply(hidden, weight, bias, job, counts)


def check_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: torch.Size,
    cut: Group,
    name: str,
) -> None:
    """Raise unless hidden states, weight and bias fit each other and the shape of all tokens."""
    if hidden.dim() < 1 + (cut.size > 1) or weight.dim() != 2:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} must be [T H], and weight of shape "
            f"{tuple(weight.shape)} this rank's rows [v H]"
        )
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has {hidden.shape[-1]} features, which must be the {weight.shape[1]} of weight"
        )
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(
            f"hidden of {hidden.dtype} and weight of {weight.dtype} must be floating-point numbers"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} must have an entry for each of {len(weight)} rows"
        )
    own = list(tokens)
    if cut.size > 1 and own:
        part = chunk_slice(own[-1], cut.size, cut.rank)
        own[-1] = part.stop - part.start
    if list(hidden.shape[:-1]) != own:
        whose = "all ranks' tokens" if cut.size > 1 else "the tokens"
        raise ValueError(
            f"{name} of shape {tuple(tokens)} must be those of {whose}, and hidden of shape "
            f"{tuple(hidden.shape)} must have the shape {tuple(own)} and one more dimension"
        )


def group_named(name: str) -> Group:
    """The group whose process group torch's functional collectives know by ``name``."""
    return Group.of(_resolve_process_group(GroupName(name))) if name else LOCAL


class _Total(torch.autograd.Function):
    """The sum of losses, scaled. Its first backward hands out what forward computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        job: Job,
        scale: Tensor,
        wanted: Wanted,
    ) -> Tensor:
        losses, ctx.gradients = job.run(hidden, weight, bias, scale, wanted)
        ctx.job, ctx.wanted = job, wanted
        ctx.save_for_backward(hidden, weight, bias, scale)
        return losses.sum() * scale.to(losses.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        # They are scaled in place and then the caller's: a backward after that starts anew.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = ctx.job.run(*ctx.saved_tensors, ctx.wanted)
        return *_scaled_(gradients, dtotal), None, None, None


def _scaled_(gradients: Gradients, scale: Tensor) -> Gradients:
    """``gradients`` times ``scale``, in place."""
    if not torch.compiler.is_compiling() and scale.device.type == "cpu" and scale == 1:
        return gradients  # as it is where backward starts: a pass over all of them saved
    dhidden, dweight, dbias = (None if x is None else x.mul_(scale) for x in gradients)
    return dhidden, dweight, dbias


class _PerToken(torch.autograd.Function):
    """Each token's loss; nothing but the inputs is saved."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job, counts: Tensor
    ) -> Tensor:
        scale = counts.new_ones((), dtype=torch.float64)
        losses, _ = job.run(hidden, weight, bias, scale, Wanted(False, False, False))
        ctx.job = job
        ctx.save_for_backward(hidden, weight, bias)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        wanted = Wanted(*ctx.needs_input_grad[:3])
        _, gradients = ctx.job.run(*ctx.saved_tensors, dlosses, wanted)
        return *gradients, None, None
