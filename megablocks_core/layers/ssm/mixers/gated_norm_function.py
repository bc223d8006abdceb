"""The gated RMS norm over groups that lie on one rank, of which little is kept for backward.

Rows are gone through in blocks that fit a cache, so that no float32 tensor of the whole length is
made.

Dimensions: R rows, I features of each, S features of a group.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from megablocks_core.layers.kernels import triton_serves

# Elements of a block.
_BLOCK = 1 << 17

silu_backward = torch.ops.aten.silu_backward.default


class Form(NamedTuple):
    """Which norm it is.

    Attributes:
        group_size: S.
        eps: Added under the root.
        norm_before_gate: The gate comes last.
    """

    group_size: int
    eps: float
    norm_before_gate: bool


def gated_norm(y: Tensor, z: Tensor, weight_I: Tensor, form: Form) -> Tensor:
    """``norm(y * silu(z)) * weight``, or ``norm(y) * weight * silu(z)`` [... I].

    At least float32 inside. Saved for backward: the arguments. A second derivative raises.
    """
    if triton_serves(y, z, weight_I):
        from megablocks_core.layers.kernels.sequences.gated_norm import gated_rms_norm

        return gated_rms_norm(y, z, weight_I, **form._asdict())
    return _GatedNorm.apply(y, z, weight_I, form)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, weight_I: Tensor, form: Form) -> Tensor:
        ctx.save_for_backward(y, z, weight_I)
        ctx.form = form
        y_RI, z_RI = _rows(y), _rows(z)
        out_RI = torch.empty_like(y_RI, memory_format=torch.contiguous_format)
        for rows in _blocks(y_RI):
            norm = _normalised(y_RI[rows], z_RI[rows], form)
            scaled = norm.of.flatten(-2).mul_(weight_I)
            out_RI[rows] = scaled.mul_(norm.gate) if form.norm_before_gate else scaled
        return out_RI.view(y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, z, weight_I = ctx.saved_tensors
        y_RI, z_RI, grad_RI = _rows(y), _rows(z), _rows(grad)
        dy_RI, dz_RI = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (y_RI, z_RI)
        )
        dw_I = torch.zeros_like(weight_I, dtype=torch.promote_types(y.dtype, torch.float32))
        for rows in _blocks(y_RI):
            norm = _normalised(y_RI[rows], z_RI[rows], ctx.form)
            dy_RI[rows], dz_RI[rows], dw_block_I = _gradients(
                grad_RI[rows].to(norm.y.dtype), norm, weight_I, ctx.form
            )
            dw_I = dw_I + dw_block_I
        return dy_RI.view(y.shape), dz_RI.view(z.shape), dw_I.to(weight_I.dtype), None


class _Norm(NamedTuple):
    """What a norm computes of a block, in float32 at least.

    Attributes:
        y: The first input.
        z: The second one.
        gate: ``silu(z)``.
        of: The normalised features by group [R G S].
        scale: By what each group was multiplied [R G 1].
    """

    y: Tensor
    z: Tensor
    gate: Tensor
    of: Tensor
    scale: Tensor


def _normalised(y: Tensor, z: Tensor, form: Form) -> _Norm:
    kind = torch.promote_types(y.dtype, torch.float32)
    y, z = y.to(kind), z.to(kind)
    gate = silu(z)
    x_RGS = (y if form.norm_before_gate else y * gate).unflatten(-1, (-1, form.group_size))
    mean_RG1 = torch.linalg.vector_norm(x_RGS, dim=-1, keepdim=True).square_() / form.group_size
    scale_RG1 = mean_RG1.add_(form.eps).rsqrt_()
    return _Norm(y, z, gate, x_RGS * scale_RG1, scale_RG1)


def _gradients(
    grad: Tensor, norm: _Norm, weight: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """Those in ``y``, ``z`` and ``weight``."""
    flat = norm.of.flatten(-2)
    outer = grad * norm.gate if form.norm_before_gate else grad
    met = outer * flat
    dw_I = met.sum(0)
    along_RG1 = met.mul_(weight).view_as(norm.of).mean(-1, keepdim=True)
    dx_RGS = (outer * weight).view_as(norm.of).addcmul_(norm.of, along_RG1, value=-1)
    dx = dx_RGS.mul_(norm.scale).flatten(-2)
    if form.norm_before_gate:
        return dx, silu_backward(flat.mul_(weight).mul_(grad), norm.z), dw_I
    return dx * norm.gate, silu_backward(dx.mul_(norm.y), norm.z), dw_I


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _blocks(x_RI: Tensor) -> Iterator[slice]:
    """Slices of rows; one if a compiler looks for itself what to do at once."""
    rows, features = x_RI.shape
    if torch.compiler.is_compiling() or x_RI.device.type != "cpu" or rows * features <= _BLOCK:
        yield slice(None)
        return
    step = max(1, _BLOCK // features)
    for start in range(0, rows, step):
        yield slice(start, start + step)
