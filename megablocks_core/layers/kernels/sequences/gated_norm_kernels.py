"""Triton kernels of the gated RMS norm, bound by memory: a program has rows of one group.

Everything is float32 in registers. Dimensions: T tokens, G groups of F features.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportCallIssue=false

import triton
import triton.language as tl


@triton.jit
def gated_norm_kernel(
    out_TGF,
    y_TGF,
    z_TGF,
    weight_GF,
    num_tokens,
    num_groups,
    num_features,
    eps,
    NORM_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """``norm(y silu(z)) weight``, or ``norm(y) weight silu(z)`` if the norm comes first."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group, features = tl.program_id(1), tl.arange(0, FEATURES)
    there = features < num_features
    inside = (tokens < num_tokens)[:, None] & there[None, :]
    at = (tokens[:, None] * num_groups + group) * num_features + features[None, :]
    y = tl.load(y_TGF + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_TGF + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_GF + group * num_features + features, mask=there, other=0.0)
    gate = z * tl.sigmoid(z)
    h = y if NORM_FIRST else y * gate
    scale = 1.0 / tl.sqrt(tl.sum(h * h, axis=1) / num_features + eps)
    out = h * scale[:, None] * weight.to(tl.float32)[None, :]
    if NORM_FIRST:
        out = out * gate
    tl.store(out_TGF + at, out.to(out_TGF.dtype.element_ty), mask=inside)


@triton.jit
def gated_norm_gradient_kernel(
    dy_TGF,
    dz_TGF,
    dweight_pGF,
    dout_TGF,
    y_TGF,
    z_TGF,
    weight_GF,
    num_tokens,
    num_groups,
    num_features,
    eps,
    NORM_FIRST: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """All gradients; that in the weight, of BLOCKS times ROWS tokens [p G F]."""
    group, features = tl.program_id(1), tl.arange(0, FEATURES)
    there = features < num_features
    weight = tl.load(weight_GF + group * num_features + features, mask=there, other=0.0)
    weight = weight.to(tl.float32)[None, :]
    dweight = tl.zeros((FEATURES,), tl.float32)
    for block in range(BLOCKS):
        first = (tl.program_id(0).to(tl.int64) * BLOCKS + block) * ROWS
        tokens = first + tl.arange(0, ROWS)
        inside = (tokens < num_tokens)[:, None] & there[None, :]
        at = (tokens[:, None] * num_groups + group) * num_features + features[None, :]
        y = tl.load(y_TGF + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(z_TGF + at, mask=inside, other=0.0).to(tl.float32)
        dout = tl.load(dout_TGF + at, mask=inside, other=0.0).to(tl.float32)
        open = tl.sigmoid(z)
        gate = z * open
        dgate = open * (1.0 + z * (1.0 - open))
        h = y if NORM_FIRST else y * gate
        scale = 1.0 / tl.sqrt(tl.sum(h * h, axis=1) / num_features + eps)[:, None]
        normed = h * scale
        dscaled = dout * gate if NORM_FIRST else dout
        dweight += tl.sum(dscaled * normed, axis=0)
        dnormed = dscaled * weight
        along = tl.sum(dnormed * normed, axis=1)[:, None] / num_features
        dh = scale * (dnormed - normed * along)
        if NORM_FIRST:
            dy, dz = dh, dout * normed * weight * dgate
        else:
            dy, dz = dh * gate, dh * y * dgate
        tl.store(dy_TGF + at, dy.to(dy_TGF.dtype.element_ty), mask=inside)
        tl.store(dz_TGF + at, dz.to(dz_TGF.dtype.element_ty), mask=inside)
    target = dweight_pGF + (tl.program_id(0).to(tl.int64) * num_groups + group) * num_features
    tl.store(target + features, dweight, mask=there)
