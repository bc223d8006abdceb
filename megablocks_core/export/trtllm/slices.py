"""Slices of tensors and what they are joined to, lazily: nothing is read here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megablocks_core.export.lazies import Box, Lazy, View, resized, shape_of, with_ends
from megablocks_core.export.operations import Join, Resize, Stack, Transpose
from megablocks_core.files.safetensors import DTYPE_CODES

# Of how many rows a mean is.
_SOME = 16


def part(whole: Lazy, start: int, size: int, dim: int = 0) -> Lazy:
    """``size`` rows, or what else ``dim`` has, from ``start`` on."""
    shape = shape_of(whole)
    assert start >= 0 and start + size <= shape[dim]

    def read(box: Box) -> Tensor:
        return whole[with_ends(box, dim, box[dim].start + start, box[dim].stop + start)]

    return View(resized(shape, dim, size), whole.get_dtype(), read)


def cut(whole: Lazy, index: int, count: int, dim: int = 0) -> Lazy:
    """One of ``count`` equal parts; the caller has checked that there are such."""
    size, rest = divmod(shape_of(whole)[dim], count)
    assert not rest
    return part(whole, index * size, size, dim)


def joined(parts: Sequence[Lazy], dim: int = 0) -> Lazy:
    """Parts side by side."""
    (whole,) = Join(tuple(shape_of(one)[dim] for one in parts), dim)(parts)
    return whole


def stacked(parts: Sequence[Lazy]) -> Lazy:
    """Tensors of one shape along a new first dimension."""
    (whole,) = Stack(len(parts))(parts)
    return whole


def transposed(whole: Lazy) -> Lazy:
    """A matrix the other way round."""
    (other,) = Transpose()([whole])
    return other


def with_zeros(whole: Lazy, rows: int) -> Lazy:
    """A table with more rows, of zeros."""
    before = shape_of(whole)[0]
    (padded,) = Resize(before, rows)([whole])
    return padded if rows > before else whole


def with_means(whole: Lazy, rows: int) -> Lazy:
    """A matrix with more rows, each the mean of its first ones."""
    before, *inner = shape_of(whole)
    if rows == before:
        return whole

    def read(box: Box) -> Tensor:
        first, last = min(box[0].start, before), min(box[0].stop, before)
        count = (box[0].stop - box[0].start) - (last - first)
        found = [whole[(slice(first, last), *box[1:])]] if first < last else []
        if count or not found:
            some = whole[(slice(0, min(before, _SOME)), *box[1:])]
            mean = some.double().mean(0, keepdim=True).to(some.dtype)
            found.append(mean.repeat(count, *[1] * len(inner)))
        return found[0] if len(found) == 1 else torch.cat(found)

    return View((rows, *inner), whole.get_dtype(), read)


def with_last_dim(whole: Lazy) -> Lazy:
    """A tensor with one more dimension, of size 1, behind the others."""

    def read(box: Box) -> Tensor:
        return whole[box[:-1]].unsqueeze(-1)[..., box[-1]]

    return View((*shape_of(whole), 1), whole.get_dtype(), read)


def numbers(values: Sequence[float], *inner: int) -> Lazy:
    """Float32 numbers [N], or [N 1 ...] with ``inner`` ones."""

    def read(box: Box) -> Tensor:
        found = torch.tensor(values, dtype=torch.float32)
        return found.view(-1, *inner)[box]

    return View((len(values), *inner), DTYPE_CODES[torch.float32], read)
