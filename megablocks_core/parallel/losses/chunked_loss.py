"""Autograd around a loss that computes its gradients itself, a chunk of tokens at a time.

Dimensions: T tokens (any number of dimensions).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.parallel.checks import check_positive, check_reduction, check_vocab_size
from megablocks_core.parallel.losses.head_gradients import Gradients, Wanted
from megablocks_core.parallel.losses.head_loss import HeadLoss


def reduced_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: HeadLoss, reduction: str
) -> Tensor:
    """Each token's loss, their sum, or that over the number of tokens that count, if any do.

    With a sum gradients are computed along; for the losses of tokens backward computes the
    logits again.
    """
    tensors, own = (hidden, weight, bias), loss.tensors
    if reduction == "none":
        return _PerToken.apply(*tensors, loss, *own)
    enabled = torch.is_grad_enabled()
    wanted = Wanted(*(enabled and x is not None and x.requires_grad for x in tensors))
    counts = loss.tensors[0]
    one = counts.new_ones((), dtype=torch.float64)
    share = counts.sum().clamp(min=1).double().reciprocal() if reduction == "mean" else one
    if torch.float16 in (hidden.dtype, weight.dtype):
        # Gradients of a mean may be too small for float16 until the caller's loss scale is in.
        total = _Total.apply(*tensors, loss, one, wanted, *own)
        return total * share.to(total.dtype)
    return _Total.apply(*tensors, loss, share, wanted, *own)


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
    if bias is not None and not bias.is_floating_point():
        raise ValueError(f"bias of {bias.dtype} must be floating-point numbers")
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


def check_options(vocab_size: int | None, soft_cap: float | None, reduction: str) -> None:
    """Raise unless the options that all losses of heads have are right."""
    check_vocab_size(vocab_size)
    check_positive("soft_cap", soft_cap)
    check_reduction(reduction)


class _Total(torch.autograd.Function):
    """The sum of losses, scaled. Its first backward hands out what forward computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: HeadLoss,
        scale: Tensor,
        wanted: Wanted,
        *tensors: Tensor,
    ) -> Tensor:
        losses, ctx.gradients = loss.run(hidden, weight, bias, scale, wanted)
        ctx.loss, ctx.wanted, ctx.dtypes = loss.of(()), wanted, _dtypes(hidden, weight, bias)
        ctx.save_for_backward(hidden, weight, bias, scale, *tensors)
        return losses.sum() * scale.to(losses.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        # They are scaled in place and then the caller's: a backward after that starts anew.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            hidden, weight, bias, scale, *tensors = ctx.saved_tensors
            loss = ctx.loss.of(tensors)
            _, gradients = loss.run(hidden, weight, bias, scale, ctx.wanted)
        gradients = _rounded(_scaled_(gradients, dtotal), ctx.dtypes)
        return *gradients, *[None] * (len(ctx.needs_input_grad) - 3)


def _scaled_(gradients: Gradients, scale: Tensor) -> Gradients:
    """``gradients`` times ``scale``, in place."""
    if not torch.compiler.is_compiling() and scale.device.type == "cpu" and scale == 1:
        return gradients  # as it is where backward starts: a pass over all of them saved
    dhidden, dweight, dbias = (None if x is None else x.mul_(scale) for x in gradients)
    return dhidden, dweight, dbias


def _dtypes(*tensors: Tensor | None) -> list[torch.dtype | None]:
    return [None if x is None else x.dtype for x in tensors]


def _rounded(gradients: Gradients, dtypes: list[torch.dtype | None]) -> Gradients:
    """``gradients`` in the dtypes of what they are of."""
    dhidden, dweight, dbias = (
        x if x is None or dtype is None else x.to(dtype)
        for x, dtype in zip(gradients, dtypes, strict=True)
    )
    return dhidden, dweight, dbias


class _PerToken(torch.autograd.Function):
    """Each token's loss; nothing but the inputs is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: HeadLoss,
        *tensors: Tensor,
    ) -> Tensor:
        scale = tensors[0].new_ones((), dtype=torch.float64)
        losses, _ = loss.run(hidden, weight, bias, scale, Wanted(False, False, False))
        ctx.loss = loss.of(())
        ctx.save_for_backward(hidden, weight, bias, *tensors)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *tensors = ctx.saved_tensors
        wanted = Wanted(*ctx.needs_input_grad[:3])
        _, gradients = ctx.loss.of(tensors).run(hidden, weight, bias, dlosses, wanted)
        gradients = _rounded(gradients, _dtypes(hidden, weight, bias))
        return *gradients, *[None] * (len(ctx.needs_input_grad) - 3)
