"""A causal depthwise convolution in Triton, forward and backward: what is launched.

Nothing is read on the host and no atomics add. Dimensions: B rows, L tokens, C channels, W taps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.kernels.launching import arrays, launch, parts
from megablocks_core.layers.kernels.sequences.convolution_kernels import (
    convolve_kernel,
    input_gradient_kernel,
    taps_gradient_kernel,
)

_BLOCKS = {"TOKENS": 32, "CHANNELS": 64}


class ConvolutionGradients(NamedTuple):
    """Gradients in the arguments of ``convolve``."""

    x: Tensor
    carry: Tensor
    weight: Tensor
    bias: Tensor | None


def convolve(
    x: Tensor,
    carry: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    places: Tensor | None,
    *,
    activation: bool,
) -> Tensor:
    """``y_t = bias + sum_d weight[:, W-1-d] x_(t-d)`` [B L C], through SiLU if asked.

    Args:
        x: [B L C]; nothing here but the carry may be empty.
        carry: The tokens before the first one [B W-1 C].
        weight: [C W].
        bias: [C].
        places: How many tokens of its document stand before each token [L]; none for one document
            that goes on from ``carry``.
        activation: SiLU follows.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    given = arrays(y, x, carry, _taps(weight), bias, places)
    named = _named(weight, bias, places, activation)
    launch(convolve_kernel, _grid(x, x.shape[1]), *given, *x.shape[1:], **named)
    return y


def convolve_gradients(
    x: Tensor,
    carry: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    places: Tensor | None,
    *,
    activation: bool,
    dy: Tensor,
) -> ConvolutionGradients:
    """Gradients in the arguments of ``convolve``, of which nothing else is kept."""
    width, taps = weight.shape[1], _taps(weight)
    grid, sizes = _grid(x, x.shape[1]), x.shape[1:]
    dtaps = x.new_empty(grid[0], width + 1, x.shape[2], dtype=torch.float32)
    dz = x.new_empty(x.shape, dtype=torch.float32) if activation else dy
    given = arrays(dtaps, dz, dy, x, carry, taps, bias, places)
    named = _named(weight, bias, places, activation)
    launch(taps_gradient_kernel, grid, *given, *sizes, **named)
    dtaps = dtaps.sum(0)

    dx, dcarry = (x.new_empty(each.shape, dtype=each.dtype) for each in (x, carry))
    del named["BIASED"], named["ACTIVATED"]
    given = arrays(dx, dcarry, dz, taps, places)
    launch(input_gradient_kernel, _grid(x, x.shape[1] + width - 1), *given, *sizes, **named)
    dweight = dtaps[:width].t().to(weight.dtype)
    return ConvolutionGradients(
        dx, dcarry, dweight, None if bias is None else dtaps[width].to(bias.dtype)
    )


def _taps(weight: Tensor) -> Tensor:
    """[W C], so that channels lie side by side as in tokens."""
    return weight.float().t().contiguous()


def _grid(x: Tensor, tokens: int) -> tuple[int, int]:
    return x.shape[0] * parts(tokens, _BLOCKS["TOKENS"]), parts(x.shape[2], _BLOCKS["CHANNELS"])


def _named(
    weight: Tensor, bias: Tensor | None, places: Tensor | None, activation: bool
) -> dict[str, int]:
    return {
        "WIDTH": weight.shape[1],
        "BIASED": bias is not None,
        "PARTED": places is not None,
        "ACTIVATED": activation,
        "num_warps": 4,
        "enable_fp_fusion": True,
        **_BLOCKS,
    }
