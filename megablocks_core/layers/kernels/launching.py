"""How a kernel in Triton is started, and what it is handed."""

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float, **named: Any) -> None:
    """Start one program for each point of the grid on the device of the first tensor."""
    (first, *_) = arguments
    assert isinstance(first, Tensor)
    if all(grid):
        with torch.cuda.device_of(first):
            kernel[grid](*arguments, **named)


def arrays(*tensors: Tensor | None) -> list[Tensor]:
    """Contiguous tensors; the first stands in for one that is missing and not read."""
    result = tensors[0]
    assert result is not None and result.is_contiguous()
    return [result if tensor is None else tensor.contiguous() for tensor in tensors]


def parts(size: int, block: int) -> int:
    """Blocks that cover a dimension."""
    return -(-size // block)
