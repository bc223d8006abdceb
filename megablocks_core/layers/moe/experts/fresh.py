"""Large tensors that are about to be filled.

On a CPU the system clears a fresh tensor page by page, which costs more than the product that
fills it; pages of 2 MiB, where Linux gives them to those who ask, halve that.
"""

import torch
from torch import Tensor

try:
    import megablocks_core._native as _native
except ModuleNotFoundError:  # a pure wheel; an extension that is there and broken still raises
    _native = None

# Bytes from which on huge pages are worth the call.
_LARGE = 4 << 20


def fresh(like: Tensor, *shape: int) -> Tensor:
    """An uninitialised tensor of that shape, with dtype and device of ``like``."""
    tensor = like.new_empty(shape)
    if _native is not None and tensor.device.type == "cpu" and tensor.nbytes >= _LARGE:
        _native.ask_for_huge_pages(tensor.view(-1).view(torch.uint8).numpy())
    return tensor
