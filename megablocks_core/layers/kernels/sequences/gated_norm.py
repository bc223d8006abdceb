"""The gated RMS norm in Triton, as one step of autograd.

Kept for backward are the arguments alone. Nothing is read on the host and no atomics add.

Dimensions: T tokens, I features in G groups of F.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.layers.kernels.launching import launch, parts
from megablocks_core.layers.kernels.sequences.gated_norm_kernels import (
    gated_norm_gradient_kernel,
    gated_norm_kernel,
)

# Numbers of a block of rows, and how many blocks a program goes through in backward.
_NUMBERS, _BLOCKS = 4096, 16


def gated_rms_norm(
    y: Tensor, z: Tensor, weight: Tensor, *, group_size: int, eps: float, norm_before_gate: bool
) -> Tensor:
    """``norm(y * silu(z)) * weight``, or ``norm(y) * weight * silu(z)``, group by group.

    Args:
        y: [... I]; nothing here may be empty.
        z: The gate [... I].
        weight: [I].
        group_size: F, which divides I.
        eps: Added to the mean of squares under the root.
        norm_before_gate: The gate comes last.
    """
    return _GatedNorm.apply(y, z, weight, group_size, eps, norm_before_gate)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        z: Tensor,
        weight: Tensor,
        group_size: int,
        eps: float,
        norm_before_gate: bool,
    ) -> Tensor:
        y, z, weight = y.contiguous(), z.contiguous(), weight.contiguous()
        ctx.save_for_backward(y, z, weight)
        ctx.sizes, ctx.eps = _sizes(y, group_size), eps
        ctx.blocks = _blocks(group_size, norm_before_gate)
        out = torch.empty_like(y)
        grid = (parts(ctx.sizes[0], ctx.blocks["ROWS"]), ctx.sizes[1])
        launch(gated_norm_kernel, grid, out, y, z, weight, *ctx.sizes, eps, **ctx.blocks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        y, z, weight = ctx.saved_tensors
        tokens, groups, features = ctx.sizes
        dy, dz = torch.empty_like(y), torch.empty_like(z)
        grid = (parts(tokens, ctx.blocks["ROWS"] * _BLOCKS), groups)
        dweight = y.new_empty(grid[0], groups * features, dtype=torch.float32)
        given = (dy, dz, dweight, dout.contiguous(), y, z, weight, *ctx.sizes, ctx.eps)
        launch(gated_norm_gradient_kernel, grid, *given, BLOCKS=_BLOCKS, **ctx.blocks)
        return dy, dz, dweight.sum(0).to(weight.dtype), None, None, None


def _sizes(y: Tensor, group_size: int) -> tuple[int, int, int]:
    return y.numel() // y.shape[-1], y.shape[-1] // group_size, group_size


def _blocks(group_size: int, norm_before_gate: bool) -> dict[str, int]:
    features = triton.next_power_of_2(group_size)
    return {
        "NORM_FIRST": norm_before_gate,
        "ROWS": max(_NUMBERS // features, 1),
        "FEATURES": features,
        "num_warps": 4 if features <= _NUMBERS else 8,
        "enable_fp_fusion": True,
    }
