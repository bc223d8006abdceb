"""Sums over a tensor's elements that add up over parts, and the statistics they give.

One row of float64 numbers a tensor: element count, sum, sum of squares, how many are not zero,
how many are not finite, and the largest magnitude. Rows of parts are added (the last number:
the larger one is kept), so statistics do not depend on how a tensor was cut. Nothing here waits
for a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

WIDTH = 6

# Elements in a block of float64: on CPU it fits a cache, elsewhere it bounds what is allocated.
_CPU_BLOCK, _BLOCK = 1 << 16, 1 << 24


@torch.no_grad()
def row_of(tensor: Tensor) -> Tensor:
    """The row [6] of ``tensor``, on its device."""
    if not tensor.numel():
        return torch.zeros(WIDTH, dtype=torch.float64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    blocks = flat.split(_CPU_BLOCK if flat.device.type == "cpu" else _BLOCK)
    numbers: list[Tensor] = []
    bounds: list[Tensor] = []
    for block in blocks:
        wide = block.to(torch.float64)
        # x - x is zero for a finite x, and NaN, which is not zero, for any other.
        numbers += (
            wide.sum(),
            torch.dot(wide, wide),
            torch.count_nonzero(block),
            torch.count_nonzero(wide - wide),
        )
        bounds += torch.aminmax(block)
    sums = torch.stack([number.double() for number in numbers]).view(len(blocks), 4).sum(0)
    largest = torch.stack(bounds).abs().amax().double()
    return torch.cat([sums.new_full((1,), flat.numel()), sums, largest.view(1)])


def add_rows(total: Tensor, rows: Tensor) -> None:
    """Add ``rows`` [... 6] to ``total``, alike in shape, in place."""
    total[..., :-1] += rows[..., :-1]
    total[..., -1] = torch.maximum(total[..., -1], rows[..., -1])


def statistics(row: Sequence[float], *, copies: float | None) -> list[tuple[str, float]]:
    """Figures of the tensor that ``row`` sums up; those of an empty row are none.

    ``copies`` is how often every element was counted, which only the norm depends on: without
    it there is no norm.
    """
    count, total, squares, nonzero, nonfinite, largest = row
    if not count:
        return []
    norm = [] if copies is None else [("norm", math.sqrt(squares / copies))]
    return [
        *norm,
        ("mean", total / count),
        ("rms", math.sqrt(squares / count)),
        ("max_abs", largest),
        ("zeros", (count - nonzero) / count),
        ("nonfinite", nonfinite / count),
    ]
