"""Products of ragged groups of rows, whose ends stay on the device.

Dimensions: N rows of all groups, e groups, O and I rows and columns of any matrix.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

# What ``grouped_mm`` takes are rows of a multiple of so many bytes, and when compiled bfloat16.
_STRIDE = 16
_KERNELS = (torch.bfloat16, torch.float16, torch.float32)


def ragged_product(a: Tensor, b: Tensor, ends_e: Tensor) -> Tensor:
    """For each group a product; rows beyond the last end are left as memory was.

    ``a`` [N I] and ``b`` [e I O] give [N O]; ``a`` [O N] and ``b`` [N I] give [e O I].
    In compiled code, dtypes that ``grouped_mm`` does not trace become one opaque operation.
    """
    if a.dtype == torch.bfloat16 and _fits(a, b):
        return F.grouped_mm(a, b, offs=ends_e)
    return _opaque(a, b, ends_e)


@torch.library.custom_op("megablocks_core::ragged_product", mutates_args=())
def _opaque(a: Tensor, b: Tensor, ends_e: Tensor) -> Tensor:
    if a.dtype in _KERNELS and _fits(a, b):
        return F.grouped_mm(a, b, offs=ends_e)
    out = _like(a, b, ends_e)
    for group, (start, end) in enumerate(pairwise([0, *ends_e.tolist()])):
        if b.dim() == 3:
            out[start:end] = a[start:end] @ b[group]
        else:
            out[group] = a[:, start:end] @ b[start:end]
    return out


@_opaque.register_fake
def _like(a: Tensor, b: Tensor, ends_e: Tensor) -> Tensor:
    if b.dim() == 3:
        return a.new_empty(a.shape[0], b.shape[2])
    return a.new_empty(ends_e.shape[0], a.shape[0], b.shape[1])


def _fits(a: Tensor, b: Tensor) -> bool:
    """Whether rows lie as ``grouped_mm`` wants them."""
    sizes = (size for tensor in (a, b) for size in _widths(tensor))
    return all(size * a.element_size() % _STRIDE == 0 for size in sizes)


def _widths(tensor: Tensor) -> tuple[int, ...]:
    """The strides between rows or columns, whichever do not lie side by side."""
    return tuple(stride for stride in tensor.stride() if stride != 1)
