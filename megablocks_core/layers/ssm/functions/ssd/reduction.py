"""Tokens reduced to what they make of the state before them: a transition and a state.

Kept for backward are the arguments alone. Tokens are gone through in blocks that a processor's
cache holds.

Dimensions: B rows, L tokens, H heads in G groups of J, P features of a head, N features of a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megablocks_core.layers.ssm.functions.ssd.decays import decay_of
from megablocks_core.layers.ssm.functions.steps import wide

_BLOCK = 2**17  # numbers of x in a block


def reduced(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, counted_L: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``s`` becomes ``transition s + state`` [B H], [B H P N], over tokens that follow each other.

    Args:
        x: [B L H P].
        dt: [B L H].
        A: [H].
        B: [B L G N].
        counted_L: Which tokens there are; the others neither decay nor add anything.
    """
    return _Reduced.apply(x, dt, A, B, counted_L)


class _Weights(NamedTuple):
    """Steps of tokens and what is left of each behind the last one [B L H]; of all [B H]."""

    dt: Tensor
    leave: Tensor
    whole: Tensor


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, counted_L: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, dt, A, B, counted_L)
        rows, _, heads, features = x.shape
        groups, numbers = B.shape[2:]
        weights = _weights(x, dt, A, counted_L)
        factor_BLH = weights.dt * weights.leave
        state = factor_BLH.new_zeros(rows, groups, heads // groups, features, numbers)
        for tokens in _blocks(x):
            left = _grouped(x[:, tokens].to(state.dtype) * factor_BLH[:, tokens, :, None], B)
            state += torch.einsum("blgjp,blgn->bgjpn", left, B[:, tokens].to(state.dtype))
        return weights.whole, state.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dwhole: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A, B, counted_L = ctx.saved_tensors
        weights, dstate = _weights(x, dt, A, counted_L), dstate.unflatten(1, (B.shape[2], -1))
        factor_BLH, kind = weights.dt * weights.leave, dstate.dtype
        dx, dB = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, B))
        dfactor_BLH = torch.empty_like(factor_BLH)
        for tokens in _blocks(x):
            some, factor = x[:, tokens].to(kind), factor_BLH[:, tokens, :, None]
            dleft = torch.einsum("blgn,bgjpn->blgjp", B[:, tokens].to(kind), dstate).flatten(2, 3)
            left = _grouped(some * factor, B)
            dx[:, tokens] = dleft * factor
            dfactor_BLH[:, tokens] = (dleft * some).sum(-1)
            dB[:, tokens] = torch.einsum("blgjp,bgjpn->blgn", left, dstate)
        # A decay is in what earlier tokens leave and in the whole, not in what its own leaves.
        dlog = _of_earlier((dfactor_BLH * factor_BLH).double()) + (dwhole * weights.whole)[:, None]
        ddt = dfactor_BLH * weights.leave + dlog * A
        if counted_L is not None:
            ddt = ddt.where(counted_L[:, None], 0)
        dA = (dlog * weights.dt).sum((0, 1))
        return dx, ddt.to(dt.dtype), dA.to(A.dtype), dB, None


def _weights(x: Tensor, dt: Tensor, A: Tensor, counted_L: Tensor | None) -> _Weights:
    kind = wide(x)
    dt_BLH = dt.to(kind)
    if counted_L is not None:
        dt_BLH = dt_BLH.where(counted_L[:, None], 0)
    log_BLH = (dt_BLH * A.to(kind)).double()
    whole_BH = log_BLH.sum(1)
    leave_BLH = decay_of((whole_BH[:, None] - log_BLH.cumsum(1)).to(kind))
    return _Weights(dt_BLH, leave_BLH, decay_of(whole_BH.to(kind)))


def _of_earlier(x_BLH: Tensor) -> Tensor:
    """Sums over all earlier tokens."""
    return pad(x_BLH, (0, 0, 1, 0))[:, :-1].cumsum(1)


def _grouped(x_BLHP: Tensor, B: Tensor) -> Tensor:
    return x_BLHP.unflatten(2, (B.shape[2], -1))


def _blocks(x: Tensor) -> Iterator[slice]:
    """Some tokens at a time; all where launches cost more than memory."""
    rows, length, heads, features = x.shape
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        yield slice(0, length)
        return
    step = max(_BLOCK // max(rows * heads * features, 1), 16)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
