"""Triton kernels for products of rows with the matrices of their experts.

Products of indices are 64 bits wide; sums are float32. Dimensions: M rows, N places, e experts, O
rows and I columns of an expert's matrix.
"""

# ruff: noqa: PLR0913 - a kernel is handed each pointer and each size
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false

import triton
import triton.language as tl


@triton.jit
def product_kernel(
    y_NO,
    x_MI,
    rows_N,
    weight_eOI,
    tile_experts,
    tile_firsts,
    tile_ends,
    num_outputs,
    num_inputs,
    stride_output,
    stride_input,
    GATHERED: tl.constexpr,
    WIDENED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """``y[n] = x[rows[n]] W^T`` for one tile of places and one block of outputs.

    The strides are those of W, so that the same kernel takes W for W^T. ``WIDENED`` multiplies
    in float32, for the interpreter, which has no bfloat16.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(tile_firsts + tile) + tl.arange(0, ROWS)
    filled = places < tl.load(tile_ends + tile)
    rows = places.to(tl.int64)
    if GATHERED:
        rows = tl.load(rows_N + places, mask=filled, other=-1).to(tl.int64)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    read = filled & (rows >= 0)
    weight_OI = weight_eOI + expert * num_outputs * num_inputs
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        within = inputs < num_inputs
        at = x_MI + rows[:, None] * num_inputs + inputs[None, :]
        x = tl.load(at, mask=read[:, None] & within[None, :], other=0.0)
        at = weight_OI + inputs.to(tl.int64)[:, None] * stride_input
        at = at + outputs.to(tl.int64)[None, :] * stride_output
        weight = tl.load(at, mask=within[:, None] & (outputs < num_outputs)[None, :], other=0.0)
        if WIDENED:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
    at = y_NO + places.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    inside = filled[:, None] & (outputs < num_outputs)[None, :]
    tl.store(at, total.to(y_NO.dtype.element_ty), mask=inside)


@triton.jit
def weight_gradient_kernel(
    gradient_eOI,
    dy_NO,
    x_MI,
    rows_N,
    starts_e,
    ends_e,
    num_outputs,
    num_inputs,
    GATHERED: tl.constexpr,
    ADDED: tl.constexpr,
    WIDENED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """``dW[e]``, the sum of ``dy[n]^T x[rows[n]]`` over its places: one block of it.

    One program goes through all of its expert's places, in their order; so there are no atomics.
    """
    expert = tl.program_id(2)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inputs = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    first, end = tl.load(starts_e + expert), tl.load(ends_e + expert)
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in range(first, end, ROWS):
        places = start + tl.arange(0, ROWS)
        rows = places
        if GATHERED:
            rows = tl.load(rows_N + places, mask=places < end, other=-1).to(tl.int64)
        read = (places < end) & (rows >= 0)
        at = dy_NO + places[None, :] * num_outputs + outputs[:, None]
        dy = tl.load(at, mask=read[None, :] & (outputs < num_outputs)[:, None], other=0.0)
        at = x_MI + rows[:, None] * num_inputs + inputs[None, :]
        x = tl.load(at, mask=read[:, None] & (inputs < num_inputs)[None, :], other=0.0)
        if WIDENED:
            dy, x = dy.to(tl.float32), x.to(tl.float32)
        total = tl.dot(dy, x, total, input_precision="ieee")
    at = gradient_eOI + expert.to(tl.int64) * num_outputs * num_inputs
    at = at + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
    inside = (outputs < num_outputs)[:, None] & (inputs < num_inputs)[None, :]
    if ADDED:
        total = total + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(gradient_eOI.dtype.element_ty), mask=inside)
