"""Cells that several ranks hold must be equal: one copy is written. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megablocks_core.ckpt.plans.boxes import as_boxes
from megablocks_core.ckpt.plans.outlines import Holding
from megablocks_core.groups.cuts import Box


class Replicas:
    """The cells with more than one holder, in one order on all ranks.

    Args:
        tensors: What the ranks hold.
    """

    def __init__(self, tensors: Sequence[Holding]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.layout.copies.max(initial=1) > 1]
        starts = np.cumsum([0] + [len(tensor.layout.cells) for tensor in self._tensors])
        self._starts = starts
        numbers, holders = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for start, tensor in zip(starts[:-1], self._tensors, strict=True):
            copies = tensor.layout.copies
            shared = np.repeat(copies > 1, copies)
            cells = np.repeat(np.arange(start, start + len(copies)), copies)
            numbers.append(cells[shared])
            holders.append(tensor.layout.holders[shared])
        self._numbers, self._holders = np.concatenate(numbers), np.concatenate(holders)

    def of(self, rank: int) -> list[tuple[str, Box]]:
        """(name, box) of the cells that ``rank`` and others hold: what it has to hash, in order."""
        found = []
        numbers = self._numbers[self._holders == rank]
        owners = np.searchsorted(self._starts, numbers, side="right") - 1
        for index in np.unique(owners):
            cells = numbers[owners == index] - self._starts[index]
            tensor = self._tensors[index]
            found += [(tensor.name, box) for box in as_boxes(tensor.layout.cells[cells])]
        return found

    def different(self, hashes: Sequence[np.ndarray]) -> list[tuple[str, int, int]]:
        """What is not equal, as (name, rank, other rank), once a name.

        Args:
            hashes: For each rank, those of the cells that ``of`` names.
        """
        order = np.argsort(self._holders, kind="stable")
        numbers, holders = self._numbers[order], self._holders[order]
        values = np.concatenate([np.empty(0, dtype=np.uint64), *hashes])
        order = np.lexsort((holders, numbers))
        numbers, holders, values = numbers[order], holders[order], values[order]
        is_first = np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]
        first = np.maximum.accumulate(np.where(is_first, np.arange(len(numbers)), 0))
        found: dict[str, tuple[str, int, int]] = {}
        for at in np.flatnonzero(values != values[first]):
            owner = int(np.searchsorted(self._starts, numbers[at], side="right")) - 1
            name = self._tensors[owner].name
            found.setdefault(name, (name, int(holders[first[at]]), int(holders[at])))
        return list(found.values())
