"""Tensors some bytes at a time, in the order in which these lie in a file."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from megablocks_core.export.lazies import Box, Lazy, shape_of
from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.files.slices import boxes, full_box

# What is read, compared or written at once.
SLAB_BYTES = 16 * 2**20
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


def are_equal(one: Lazy, other: Lazy) -> bool:
    """Whether two tensors have one shape and equal values, some at a time; NaN equals nothing."""
    shape = shape_of(one)
    if shape != shape_of(other):
        return False
    return all(torch.equal(one[box], other[box]) for box in slabs(shape, dtype_of(one)))


def slabs(shape: tuple[int, ...], dtype: torch.dtype, reads: int = 1) -> Iterator[Box]:
    """Boxes that cover a tensor in its order; one if it is empty.

    Args:
        shape: Of the tensor.
        dtype: Its dtype.
        reads: How many bytes are read for each of its own, of which a box is ``SLAB_BYTES``.
    """
    whole = full_box((), shape)
    if prod(shape):
        yield from boxes(whole, dtype.itemsize, SLAB_BYTES // reads)
    else:
        yield whole
