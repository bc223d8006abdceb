"""How two tensors, or two JSON values, differ: lines for a reader, a slab of values at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.files.progress import Progress
from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.groups.cuts import Box

# Elements that are compared at once, in float64.
_CHUNK = 2**20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Gap(NamedTuple):
    """How far two tensors of one shape are apart.

    Attributes:
        count: Elements that differ; of one dtype, in any bit.
        absolute: The largest absolute difference; infinite beside a NaN.
        relative: The largest difference by the larger of two absolute values.
    """

    count: int = 0
    absolute: float = 0.0
    relative: float = 0.0

    def join(self, other: Gap) -> Gap:
        """That of both together."""
        return Gap(
            self.count + other.count,
            max(self.absolute, other.absolute),
            max(self.relative, other.relative),
        )


class Compared(NamedTuple):
    """A tensor of one side.

    Attributes:
        dtype: Its dtype.
        shape: Of the whole.
        read: Gives the values of a box.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Box], Tensor]


def side(first: bool) -> str:
    """What a line calls one of the two."""
    return "the first" if first else "the second"


def tensor_differences(
    name: str,
    one: Compared | None,
    other: Compared | None,
    *,
    boxes: Callable[[Compared], Iterable[Box]],
    progress: Progress,
) -> Iterator[str]:
    """A line for each difference of the tensors of one name; ``None`` where a side has none.

    Args:
        name: What lines call it.
        one: That of the first.
        other: That of the second.
        boxes: Boxes that cover a tensor, each of which fits in memory.
        progress: Told of each box.
    """
    if one is None or other is None:
        yield f"only in {side(other is None)}: tensor {name}"
        return
    if one.shape != other.shape:
        yield f"tensor {name}: shape {list(one.shape)} and {list(other.shape)}"
        return
    if one.dtype != other.dtype:
        yield f"tensor {name}: dtype {DTYPE_CODES[one.dtype]} and {DTYPE_CODES[other.dtype]}"
    gap = Gap()
    for box in boxes(one):
        first, second = one.read(box).flatten(), other.read(box).flatten()
        for start in range(0, first.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            gap = gap.join(gap_of(first[part], second[part]))
        progress.add(first.nbytes)
    if gap.count:
        yield (
            f"tensor {name}: {gap.count} of {math.prod(one.shape)} values differ, by at most "
            f"{gap.absolute:.6g}, relatively {gap.relative:.6g}"
        )


def gap_of(first: Tensor, second: Tensor) -> Gap:
    """How far two tensors of one shape, one-dimensional and in memory, are apart."""
    if first.dtype == second.dtype:
        bits = _BITS[first.itemsize]
        unequal = first.view(bits) != second.view(bits)
        if not unequal.any():
            return Gap()
        first, second = first[unequal].double(), second[unequal].double()
        count = len(first)
    else:
        first, second = first.double(), second.double()
        count = int((~_same(first, second)).sum())
    distance = (first - second).abs()
    distance[_same(first, second)] = 0.0
    distance = distance.nan_to_num(nan=math.inf, posinf=math.inf)
    relative = distance / torch.maximum(first.abs(), second.abs())
    relative[distance == 0] = 0.0
    relative = relative.nan_to_num(nan=math.inf, posinf=math.inf)
    return Gap(count, distance.max().item(), relative.max().item())


def _same(first: Tensor, second: Tensor) -> Tensor:
    return (first == second) | (first.isnan() & second.isnan())


def json_differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """A line for each place, by the path to it, where two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            inner = f"{path}.{key}" if path else key
            if key in one and key in other:
                yield from json_differences(one[key], other[key], inner)
            else:
                yield f"only in {side(key in one)}: {inner}"
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from json_differences(a, b, f"{path}[{index}]")
    else:
        texts = [json.dumps(value) for value in (one, other)]
        if texts[0] != texts[1]:
            yield f"{path}: {_short(texts[0])} and {_short(texts[1])}"


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."
