"""How two checkpoints differ: names, shapes, dtypes, values, JSON. A slab at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.ckpt.tools.checkpoint import Checkpoint, Held
from megablocks_core.ckpt.tools.progress import Progress
from megablocks_core.files.safetensors import DTYPE_CODES

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


def diff(one: Checkpoint, other: Checkpoint, *, progress: Progress) -> Iterator[str]:
    """A line for each difference; none if both hold the same.

    Names, shapes, dtypes and values of tensors; entries and JSON values, by the path to what
    differs in them (so run records too); files beside the tensors.

    Raises:
        CheckpointError: What is stored is damaged.
    """
    yield from _values(one.state, other.state)
    for name in [*one.tensors, *(name for name in other.tensors if name not in one.tensors)]:
        pair = (one.tensors.get(name), other.tensors.get(name))
        yield from _tensors(name, pair, one, other, progress)
    files, others = one.beside(), other.beside()
    for file in sorted(files.keys() | others.keys()):
        if file not in files or file not in others:
            yield f"only in {_side(file in files)}: file {file}"
        elif files[file] != others[file]:
            yield f"file {file}: differs"


def _side(first: bool) -> str:
    return "the first" if first else "the second"


def _tensors(
    name: str,
    pair: tuple[Held | None, Held | None],
    one: Checkpoint,
    other: Checkpoint,
    progress: Progress,
) -> Iterator[str]:
    a, b = pair
    if a is None or b is None:
        yield f"only in {_side(b is None)}: tensor {name}"
        return
    if a.shape != b.shape:
        yield f"tensor {name}: shape {list(a.shape)} and {list(b.shape)}"
        return
    if a.dtype != b.dtype:
        yield f"tensor {name}: dtype {DTYPE_CODES[a.dtype]} and {DTYPE_CODES[b.dtype]}"
    gap = Gap()
    for box in a.slabs():
        first, second = one.read(name, box).flatten(), other.read(name, box).flatten()
        for start in range(0, first.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            gap = gap.join(_gap(first[part], second[part]))
        progress.add(first.nbytes)
    if gap.count:
        yield (
            f"tensor {name}: {gap.count} of {math.prod(a.shape)} values differ, by at most "
            f"{gap.absolute:.6g}, relatively {gap.relative:.6g}"
        )


def _gap(first: Tensor, second: Tensor) -> Gap:
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


def _values(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            inner = f"{path}.{key}" if path else key
            if key in one and key in other:
                yield from _values(one[key], other[key], inner)
            else:
                yield f"only in {_side(key in one)}: {inner}"
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _values(a, b, f"{path}[{index}]")
    else:
        texts = [json.dumps(value) for value in (one, other)]
        if texts[0] != texts[1]:
            yield f"{path}: {_short(texts[0])} and {_short(texts[1])}"


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."
