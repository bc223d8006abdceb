"""Triton kernels of a causal depthwise convolution, bound by memory.

Sums are float32. Offsets are 64 bits wide. Dimensions: B rows, L tokens, C channels, W taps.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def shifted(
    x,
    carry,
    places,
    tokens,
    channels,
    length,
    num_channels,
    DISTANCE: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTED: tl.constexpr,
):
    """The tokens DISTANCE before these, in float32; zeros where they are of another document."""
    before = tokens - DISTANCE
    inside = (tokens < length)[:, None] & (channels < num_channels)[None, :]
    if PARTED:
        within = tl.load(places + tokens, mask=tokens < length, other=-1) >= DISTANCE
        inside = inside & within[:, None]
    at = before[:, None] * num_channels + channels[None, :]
    found = tl.load(x + at, mask=inside & (before >= 0)[:, None], other=0.0).to(tl.float32)
    if DISTANCE > 0:
        at = at + (WIDTH - 1) * num_channels
        led = inside & (before < 0)[:, None]
        found += tl.load(carry + at, mask=led, other=0.0).to(tl.float32)
    return found


@triton.jit
def convolve_kernel(
    y_BLC,
    x_BLC,
    carry_BVC,
    taps_WC,
    bias_C,
    places_L,
    length,
    num_channels,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    PARTED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``y_t = bias + sum_d taps[W-1-d] x_(t-d)``, through SiLU if activated."""
    blocks = tl.cdiv(length, TOKENS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = (tl.program_id(0) % blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    x, carry = x_BLC + row * length * num_channels, carry_BVC + row * (WIDTH - 1) * num_channels
    z = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if BIASED:
        bias = tl.load(bias_C + channels, mask=channels < num_channels, other=0.0)
        z += bias.to(tl.float32)[None, :]
    for distance in tl.static_range(WIDTH):
        part = shifted(
            x, carry, places_L, tokens, channels, length, num_channels, distance, WIDTH, PARTED
        )
        tap = taps_WC + (WIDTH - 1 - distance) * num_channels + channels
        z += part * tl.load(tap, mask=channels < num_channels, other=0.0)[None, :]
    if ACTIVATED:
        z = z * tl.sigmoid(z)
    inside = (tokens < length)[:, None] & (channels < num_channels)[None, :]
    target = (
        y_BLC + row * length * num_channels + tokens[:, None] * num_channels + channels[None, :]
    )
    tl.store(target, z.to(y_BLC.dtype.element_ty), mask=inside)


@triton.jit
def taps_gradient_kernel(
    dtaps_pVC,
    dz_BLC,
    dy_BLC,
    x_BLC,
    carry_BVC,
    taps_WC,
    bias_C,
    places_L,
    length,
    num_channels,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    PARTED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """This block's part of the gradients in taps, and behind them in the bias [W+1 C].

    If activated, ``dz`` becomes the gradient before SiLU; else ``dy`` is that.
    """
    blocks = tl.cdiv(length, TOKENS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = (tl.program_id(0) % blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channels < num_channels
    x, carry = x_BLC + row * length * num_channels, carry_BVC + row * (WIDTH - 1) * num_channels
    inside = (tokens < length)[:, None] & there[None, :]
    at = row * length * num_channels + tokens[:, None] * num_channels + channels[None, :]
    dz = tl.load(dy_BLC + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATED:
        z = tl.zeros((TOKENS, CHANNELS), tl.float32)
        if BIASED:
            z += tl.load(bias_C + channels, mask=there, other=0.0).to(tl.float32)[None, :]
        for distance in tl.static_range(WIDTH):
            part = shifted(
                x, carry, places_L, tokens, channels, length, num_channels, distance, WIDTH, PARTED
            )
            tap = taps_WC + (WIDTH - 1 - distance) * num_channels + channels
            z += part * tl.load(tap, mask=there, other=0.0)[None, :]
        gate = tl.sigmoid(z)
        dz = dz * gate * (1.0 + z * (1.0 - gate))
        tl.store(dz_BLC + at, dz, mask=inside)
    target = dtaps_pVC + tl.program_id(0).to(tl.int64) * (WIDTH + 1) * num_channels + channels
    tl.store(target + WIDTH * num_channels, tl.sum(dz, axis=0), mask=there)
    for distance in tl.static_range(WIDTH):
        part = shifted(
            x, carry, places_L, tokens, channels, length, num_channels, distance, WIDTH, PARTED
        )
        total = tl.sum(dz * part, axis=0)
        tl.store(target + (WIDTH - 1 - distance) * num_channels, total, mask=there)


@triton.jit
def input_gradient_kernel(
    dx_BLC,
    dcarry_BVC,
    dz_BLC,
    taps_WC,
    places_L,
    length,
    num_channels,
    WIDTH: tl.constexpr,
    PARTED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``dx_t = sum_d taps[W-1-d] dz_(t+d)`` of tokens and of the W - 1 before them."""
    blocks = tl.cdiv(length + WIDTH - 1, TOKENS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    window = (tl.program_id(0) % blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    tokens = window - (WIDTH - 1)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = (channels < num_channels)[None, :]
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for distance in tl.static_range(WIDTH):
        after = tokens + distance
        inside = (after >= 0) & (after < length)
        if PARTED:
            inside = inside & (tl.load(places_L + after, mask=inside, other=-1) >= distance)
        at = (row * length + after)[:, None] * num_channels + channels[None, :]
        dz = tl.load(dz_BLC + at, mask=inside[:, None] & there, other=0.0).to(tl.float32)
        tap = taps_WC + (WIDTH - 1 - distance) * num_channels + channels
        total += dz * tl.load(tap, mask=channels < num_channels, other=0.0)[None, :]
    at = (row * length + tokens)[:, None] * num_channels + channels[None, :]
    mine = ((tokens >= 0) & (tokens < length))[:, None] & there
    tl.store(dx_BLC + at, total.to(dx_BLC.dtype.element_ty), mask=mine)
    at = (row * (WIDTH - 1) + window)[:, None] * num_channels + channels[None, :]
    before = (tokens < 0)[:, None] & there
    tl.store(dcarry_BVC + at, total.to(dcarry_BVC.dtype.element_ty), mask=before)
