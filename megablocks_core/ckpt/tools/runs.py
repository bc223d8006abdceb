"""Where a box of a row-major tensor lies in it, as runs of elements. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from megablocks_core.ckpt.plans.boxes import lengths
from megablocks_core.groups.cuts import Box


class Run(NamedTuple):
    """Elements of a box that lie one after the other in the tensor that the box is of.

    Attributes:
        start: First element, in the flattened tensor.
        length: Number of elements.
        place: First element, in the flattened box.
    """

    start: int
    length: int
    place: int


def runs(box: Box, shape: tuple[int, ...]) -> Iterator[Run]:
    """The runs of a box of a row-major tensor of ``shape``, in rising order."""
    dims = len(shape)
    # Dimensions from ``inner`` on are whole: together with one more they make a run.
    inner = dims
    while inner > 0 and lengths(box)[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    row = prod(shape[inner:]) if inner else prod(shape)
    count = (lengths(box)[outer] if inner else 1) * row
    strides = [prod(shape[dim + 1 :]) for dim in range(dims)]
    base = sum(part.start * stride for part, stride in zip(box, strides, strict=True))
    rows = lengths(box)[:outer]
    for number in range(prod(rows)):
        start, rest = base, number
        for dim in reversed(range(outer)):
            rest, index = divmod(rest, rows[dim])
            start += index * strides[dim]
        yield Run(start, count, number * count)
