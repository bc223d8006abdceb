"""Boxes of the tensors of files, joined of boxes of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megablocks_core.export.layout import Rule
from megablocks_core.export.operations import Box, View

NamedBox = tuple[str, Box]


class Joined:
    """The tensors of files that one rule makes of ours, box by box.

    Args:
        rule: Says of which of ours they are made.
    """

    def __init__(self, rule: Rule) -> None:
        self._read: Callable[[str, Box], Tensor] = _no_values
        ours = [View(shape, "", partial(self._part, name)) for name, shape in rule.shapes.items()]
        self._theirs = rule.to_theirs(ours)

    def needs(self, name: str, box: Box) -> list[NamedBox]:
        """The boxes of ours that a box of theirs is made of; nothing is computed."""
        found: list[NamedBox] = []

        def noted(ours: str, part: Box) -> Tensor:
            found.append((ours, part))
            return torch.empty([one.stop - one.start for one in part], device="meta")

        self._box(name, box, noted)
        return found

    def made(self, name: str, box: Box, values: Sequence[Tensor]) -> Tensor:
        """A box of theirs, from the values of what it ``needs``."""
        waiting = iter(values)
        return self._box(name, box, lambda *_: next(waiting))

    def _box(self, name: str, box: Box, read: Callable[[str, Box], Tensor]) -> Tensor:
        self._read = read
        try:
            return self._theirs[name][box]
        finally:
            self._read = _no_values

    def _part(self, name: str, box: Box) -> Tensor:
        return self._read(name, box)


def _no_values(name: str, _: Box) -> Tensor:
    raise AssertionError(f"{name} was not asked for by a box of theirs")
