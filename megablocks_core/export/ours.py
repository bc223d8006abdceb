"""Our logical tensors as what tensors of files are made of, box by box."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from megablocks_core.export.lazies import Box, Lazy, View
from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.groups import Whole

NamedBox = tuple[str, Box]
T = TypeVar("T")


class Visited(Protocol):
    """What gives boxes of our logical tensors, as a ``Collection`` does."""

    def visit(
        self,
        wanted: Mapping[int, Iterable[tuple[T, Sequence[NamedBox]]]],
        consume: Callable[[T, list[Tensor]], None],
    ) -> None:
        """Call ``consume(key, values)`` on each rank for all that it wants, in order."""
        ...


class Ours:
    """The logical tensors of a model, without values.

    What operations make of them can say which boxes of ours a box of it needs, and is computed
    once these are at hand.

    Args:
        wholes: What each tensor is as a whole.
    """

    def __init__(self, wholes: Iterable[Whole]) -> None:
        self._read: Callable[[str, Box], Tensor] = _no_values
        self._dtypes: dict[str, torch.dtype] = {}
        self._tensors: dict[str, Lazy] = {}
        for name, shape, dtype in wholes:
            self._dtypes[name] = dtype
            self._tensors[name] = View(shape, DTYPE_CODES[dtype], partial(self._part, name))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Lazy:
        return self._tensors[name]

    def needs(self, made: Lazy, box: Box) -> list[NamedBox]:
        """The boxes of ours that a box of ``made`` needs.

        Nothing is computed: operations work on tensors on meta.
        """
        found: list[NamedBox] = []

        def noted(name: str, part: Box) -> Tensor:
            found.append((name, part))
            shape = [one.stop - one.start for one in part]
            return torch.empty(shape, dtype=self._dtypes[name], device="meta")

        self._box(made, box, noted)
        return found

    def values(self, made: Lazy, box: Box, needed: Sequence[Tensor]) -> Tensor:
        """A box of ``made``, from the values of what it ``needs``."""
        waiting = iter(needed)
        return self._box(made, box, lambda *_: next(waiting))

    def _box(self, made: Lazy, box: Box, read: Callable[[str, Box], Tensor]) -> Tensor:
        self._read = read
        try:
            return made[box]
        finally:
            self._read = _no_values

    def _part(self, name: str, box: Box) -> Tensor:
        return self._read(name, box)


def _no_values(name: str, _: Box) -> Tensor:
    raise AssertionError(f"{name} was not asked for by a box of theirs")
