"""Tensors whose shapes are known at once, and whose values are read box by box.

So a rank reads what it holds and no more. Slices of files are such tensors, those in memory
(``lazy``), and what operations make of either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

Shape = tuple[int, ...]
Box = tuple[slice, ...]


class Lazy(Protocol):
    """A tensor whose values are read when a box of it is asked for, as safetensors gives them."""

    def get_shape(self) -> Sequence[int]:
        """The shape of the whole."""
        ...

    def get_dtype(self) -> str:
        """The dtype, as safetensors writes it."""
        ...

    def __getitem__(self, box: Any) -> Tensor:
        """The values of a box: slices without steps, for the first dimensions or for all."""
        ...


class View:
    """What an operation gives.

    Args:
        shape: Of the whole.
        dtype: As safetensors writes it.
        read: Gives the values of a box with a slice for each dimension.
    """

    def __init__(self, shape: Shape, dtype: str, read: Callable[[Box], Tensor]) -> None:
        self._shape, self._dtype, self._read = shape, dtype, read

    def get_shape(self) -> Shape:
        """The shape of the whole."""
        return self._shape

    def get_dtype(self) -> str:
        """The dtype, as safetensors writes it."""
        return self._dtype

    def __getitem__(self, box: Any) -> Tensor:
        given = box if isinstance(box, tuple) else (box,)
        slices = [] if given[:1] == (...,) else list(given)
        slices += [slice(None)] * (len(self._shape) - len(slices))
        ends = [part.indices(size) for part, size in zip(slices, self._shape, strict=True)]
        return self._read(tuple(slice(start, max(start, stop)) for start, stop, _ in ends))


def lazy(tensor: Tensor, dtype: str = "") -> Lazy:
    """A tensor in memory."""
    return View(tuple(tensor.shape), dtype, lambda box: tensor[box])


def outline(shape: Shape) -> Lazy:
    """A shape without values."""

    def read(_: Box) -> Tensor:
        raise AssertionError("an outline has no values")

    return View(shape, "", read)


def shape_of(tensor: Lazy) -> Shape:
    """The shape of the whole."""
    return tuple(tensor.get_shape())


def resized(shape: Shape, dim: int, size: int) -> Shape:
    """A shape with another size in one dimension."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def with_ends(box: Box, dim: int, start: int, stop: int) -> Box:
    """A box with other ends in one dimension."""
    return (*box[:dim], slice(start, stop), *box[dim + 1 :])
