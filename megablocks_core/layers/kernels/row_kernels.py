"""Triton kernels that move rows: bound by memory, so a program moves a block of rows and features.

Products of indices are 64 bits wide. Dimensions: M rows, N places, T tokens, k slots a token, H
features.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def take_kernel(
    taken_NH,
    x_MH,
    rows_N,
    weights_N,
    num_places,
    num_features,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """``taken[n] = weights[n] x[rows[n]]``, zero where the row is negative."""
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = (places < num_places)[:, None] & (features < num_features)[None, :]
    rows = tl.load(rows_N + places, mask=places < num_places, other=-1).to(tl.int64)
    read = inside & (rows >= 0)[:, None]
    taken = tl.load(x_MH + rows[:, None] * num_features + features[None, :], mask=read, other=0.0)
    if WEIGHTED:
        weights = tl.load(weights_N + places, mask=places < num_places, other=0.0)
        # A row that is not there stays zero, whatever its weight is.
        taken = tl.where(read, taken.to(tl.float32) * weights.to(tl.float32)[:, None], 0.0)
    target = taken_NH + places[:, None] * num_features + features[None, :]
    tl.store(target, taken.to(taken_NH.dtype.element_ty), mask=inside)


@triton.jit
def total_kernel(
    total_TH,
    y_NH,
    places_Tk,
    weights_N,
    num_tokens,
    num_slots,
    num_features,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """``total[t]``: the sum of ``weights[p] y[p]`` over its places p >= 0, in slot order."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = (tokens < num_tokens)[:, None] & (features < num_features)[None, :]
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    for slot in range(num_slots):
        at = places_Tk + tokens * num_slots + slot
        places = tl.load(at, mask=tokens < num_tokens, other=-1).to(tl.int64)
        read = inside & (places >= 0)[:, None]
        source = y_NH + places[:, None] * num_features + features[None, :]
        row = tl.load(source, mask=read, other=0.0).to(tl.float32)
        if WEIGHTED:
            weights = tl.load(weights_N + places, mask=places >= 0, other=0.0)
            row = row * weights.to(tl.float32)[:, None]
        total = total + row
    target = total_TH + tokens[:, None] * num_features + features[None, :]
    tl.store(target, total.to(total_TH.dtype.element_ty), mask=inside)


@triton.jit
def row_products_kernel(
    products_N,
    x_MH,
    rows_N,
    y_NH,
    num_places,
    num_features,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """``products[n]``: the inner product of ``x[rows[n]]`` and ``y[n]``; 0 for a negative row."""
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = tl.load(rows_N + places, mask=places < num_places, other=-1).to(tl.int64)
    products = tl.zeros((ROWS, FEATURES), tl.float32)
    for start in range(0, num_features, FEATURES):
        features = start + tl.arange(0, FEATURES)
        read = (rows >= 0)[:, None] & (features < num_features)[None, :]
        x = tl.load(x_MH + rows[:, None] * num_features + features[None, :], mask=read, other=0.0)
        y = tl.load(y_NH + places[:, None] * num_features + features[None, :], mask=read, other=0.0)
        products = products + x.to(tl.float32) * y.to(tl.float32)
    tl.store(products_N + places, tl.sum(products, axis=1), mask=places < num_places)
