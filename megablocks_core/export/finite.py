"""The ends of values in one pass and without a copy, and whether all are finite."""

from __future__ import annotations

import torch
from torch import Tensor


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return bool(ends(values).isfinite().all())


def ends(values: Tensor) -> Tensor:
    """The least and the greatest value, NaN if one is; what cannot be infinite gives zeros."""
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.numel() or not values.is_floating_point():
        return torch.zeros(2)
    if values.dtype.itemsize == 1:
        values = values.float()  # aminmax does not know them
    return torch.stack(torch.aminmax(values.detach()))
