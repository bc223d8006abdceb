"""A causal depthwise convolution as shifted multiply-adds, with its backward.

The sequence is gone through in blocks that a processor's cache holds, so that memory is read and
written once, not once a tap. Backward keeps the input alone and computes each block again.

Dimensions: B rows, l tokens, n tokens of a block, C channels, W taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from megablocks_core.layers.kernels import triton_serves
from megablocks_core.layers.ssm.functions.steps import wide

BLOCK = 2**17  # numbers of a block, 512 KiB in float32


def convolve(
    x: Tensor,
    carry: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    places: Tensor | None = None,
    activation: bool = False,
) -> Tensor:
    """Outputs of each token's window, ``y_t = bias + sum_d weight[:, W-1-d] x_(t-d)`` [B l C].

    Sums are taken in at least float32.

    Args:
        x: [B l C].
        carry: The tokens before the first one [B W-1 C].
        weight: [C W].
        bias: [C].
        places: How many tokens of its document stand before each token [l]: a window ends where
            its document begins. Without them it reaches into ``carry``.
        activation: The outputs pass through SiLU.
    """
    return _Convolve.apply(x, carry, weight, bias, places, activation)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        carry: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        places: Tensor | None,
        activation: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, carry, weight, bias, places)
        ctx.activation = activation
        if triton_serves(x, weight, bias, places):
            from megablocks_core.layers.kernels.sequences import convolution as kernels

            return kernels.convolve(x, carry, weight, bias, places, activation=activation)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        taps_WC = _taps(weight, x)
        for start, stop in _blocks(x):
            shifted = _shifted(x, carry, places, start, stop, len(taps_WC))
            z = _sum(shifted, taps_WC, bias)
            y[:, start:stop] = silu(z) if activation else z
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, carry, weight, bias, places = ctx.saved_tensors
        if triton_serves(x, weight, bias, places, dy):
            from megablocks_core.layers.kernels.sequences import convolution as kernels

            options = {"activation": ctx.activation, "dy": dy}
            gradients = kernels.convolve_gradients(x, carry, weight, bias, places, **options)
            return *gradients, None, None
        taps_WC = _taps(weight, x)
        width = len(taps_WC)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dtaps = torch.zeros_like(taps_WC)
        dbias = torch.zeros_like(taps_WC[0])
        # The gradient of the tokens before a block, which the block before it takes over.
        before = taps_WC.new_zeros(carry.shape)
        for start, stop in reversed(_blocks(x)):
            shifted = _shifted(x, carry, places, start, stop, width)
            dz = dy[:, start:stop].to(taps_WC.dtype)
            if ctx.activation:
                z = _sum(shifted, taps_WC, bias)
                dz = torch.ops.aten.silu_backward(dz, z)
            dbias += dz.sum((0, 1))
            for distance, part in enumerate(shifted):
                dtaps[width - 1 - distance] += (dz * part).sum((0, 1))
            window = _window_gradient(dz, taps_WC, places, start, stop)
            window[:, stop - start :] += before
            dx[:, start:stop] = window[:, width - 1 :]
            before = window[:, : width - 1]
        dweight = dtaps.t().to(weight.dtype)
        dbias = None if bias is None else dbias.to(bias.dtype)
        return dx, before.to(carry.dtype), dweight, dbias, None, None


def _taps(weight: Tensor, x: Tensor) -> Tensor:
    """The taps with channels side by side, as tokens have them [W C]."""
    return weight.t().to(wide(x, weight)).contiguous()


def _blocks(x: Tensor) -> list[tuple[int, int]]:
    """(start, stop) of each block of tokens; one block where launches cost more than memory."""
    rows, length, channels = x.shape
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return [(0, length)]
    step = max(BLOCK // max(rows * channels, 1), 16)
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _shifted(
    x: Tensor, carry: Tensor, places: Tensor | None, start: int, stop: int, width: int
) -> list[Tensor]:
    """A block's tokens, those one before them, two before them, and so on: W of [B n C].

    Zeros stand where a token is of an earlier document, so that nothing of it gets through.
    """
    if start >= width - 1:
        window = x[:, start - (width - 1) : stop]
    else:
        window = torch.cat((carry[:, start:].to(x.dtype), x[:, :stop]), dim=1)
    window = window.to(wide(x))
    views = [window[:, width - 1 - d : width - 1 - d + stop - start] for d in range(width)]
    within = _within(places, start, stop, width)
    return [views[0], *(_kept(view, mask) for view, mask in zip(views[1:], within, strict=True))]


def _within(places: Tensor | None, start: int, stop: int, width: int) -> list[Tensor | None]:
    """Which of a block's windows reach one token back, two, ... in their document [n 1]."""
    if places is None:
        return [None] * (width - 1)
    places = places[start:stop]
    hidden = torch.compiler.is_compiling() or isinstance(places, FakeTensor)
    # On the CPU a look costs no wait, and most blocks hold no document's start.
    if not hidden and places.device.type == "cpu" and bool((places >= width - 1).all()):
        return [None] * (width - 1)
    return [(places >= distance)[:, None] for distance in range(1, width)]


def _kept(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask, x, 0)


def _sum(shifted: list[Tensor], taps_WC: Tensor, bias: Tensor | None) -> Tensor:
    own, *earlier = zip(shifted, reversed(taps_WC.unbind()), strict=True)
    z = own[0] * own[1] if bias is None else torch.addcmul(bias.to(taps_WC.dtype), *own)
    for part, tap in earlier:
        z.addcmul_(part, tap)
    return z


def _window_gradient(
    dz: Tensor, taps_WC: Tensor, places: Tensor | None, start: int, stop: int
) -> Tensor:
    """The gradient of a block's tokens and of the W - 1 before them [B W-1+n C]."""
    width, length = len(taps_WC), stop - start
    window = dz.new_zeros(dz.shape[0], width - 1 + length, dz.shape[2])
    for distance, mask in enumerate([None, *_within(places, start, stop, width)]):
        first = width - 1 - distance
        window[:, first : first + length].addcmul_(_kept(dz, mask), taps_WC[first])
    return window
