"""Lazy tensors, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from megablocks_core.export.operations import Box, Lazy
from megablocks_core.files.safetensors import DTYPE_CODES

# Bytes that are read at once, if a row is no longer.
SLAB_BYTES = 32 * 2**20
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


def dtype_of(tensor: Lazy) -> torch.dtype:
    """The dtype of a tensor's values.

    Raises:
        ValueError: torch has none for the code.
    """
    code = tensor.get_dtype()
    if code not in _DTYPES:
        raise ValueError(f"dtype {code} must be one of {', '.join(_DTYPES)}")
    return _DTYPES[code]


def nbytes_of(tensor: Lazy) -> int:
    """Its size in bytes."""
    return prod(tensor.get_shape()) * dtype_of(tensor).itemsize


def slabs(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Box]:
    """Boxes that cover a tensor, of as many rows as ``SLAB_BYTES`` hold, or of one."""
    if not shape:
        yield ()
        return
    row = prod(shape[1:]) * dtype.itemsize
    step = max(1, SLAB_BYTES // max(row, 1))
    inside = tuple(slice(0, length) for length in shape[1:])
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])), *inside)
