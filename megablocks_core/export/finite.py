"""Whether values are finite, and their ends, in one pass and without a copy of them all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megablocks_core.files.slices import boxes, full_box

# Of the bits of infinity: integers of the same width, and these bits read as one of them. What
# is above is no number; with the sign the same holds of integers without one.
_INFINITE = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}
# Of what must be copied to be looked at, so much is at a time.
_PART_BYTES = 2**21


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    values = _real(values)
    if values.dtype not in _INFINITE or values.device.type != "cpu" or not values.numel():
        return bool(ends(values).isfinite().all())
    # Maxima of integers are many times as fast as those of numbers, where NaN is looked for.
    kind, infinite = _INFINITE[values.dtype]
    bits = values.detach().view(kind).numpy()
    unsigned = bits.view(f"u{bits.itemsize}")
    return bool(bits.max() < infinite and unsigned.max() < infinite | 1 << 8 * bits.itemsize - 1)


def ends(values: Tensor) -> Tensor:
    """The least and the greatest value, NaN if one is; what cannot be infinite gives zeros."""
    values = _real(values.detach())
    if not values.numel() or not values.is_floating_point():
        return torch.zeros(2)
    if values.is_contiguous() and values.dtype.itemsize > 1:
        return torch.stack(torch.aminmax(values))
    found = [torch.stack(torch.aminmax(part)) for part in _parts(values)]
    return torch.stack(torch.aminmax(torch.stack(found)))


def greatest_finite(values: Tensor) -> float:
    """The greatest absolute value of those that are finite, 0 if none is."""
    every = _parts(_real(values.detach()))
    finite = (part[part.isfinite()] for part in every)
    return max((float(ends(part).abs().max()) for part in finite), default=0.0)


def _parts(values: Tensor) -> Iterator[Tensor]:
    """A few values at a time, in a dtype and a layout whose ends torch finds without a copy."""
    for box in boxes(full_box((), tuple(values.shape)), values.dtype.itemsize, _PART_BYTES):
        part = values[box].contiguous()
        # aminmax does not know numbers of eight bits
        yield part.float() if part.dtype.itemsize == 1 else part


def _real(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values
