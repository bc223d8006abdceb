"""Whether values are finite, and their ends, in one pass and without a copy."""

from __future__ import annotations

import torch
from torch import Tensor

# Of the bits of infinity: integers of the same width, and these bits read as one of them. What
# is above is no number; with the sign the same holds of integers without one.
_INFINITE = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}


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
    values = _real(values)
    if not values.numel() or not values.is_floating_point():
        return torch.zeros(2)
    if values.dtype.itemsize == 1:
        values = values.float()  # aminmax does not know them
    return torch.stack(torch.aminmax(values.detach()))


def _real(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values
