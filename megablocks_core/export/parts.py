"""Our logical tensors as parts of the tensors of files: read as slices, written as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megablocks_core.export.layout import OnDisk


class Part:
    """One part of a tensor on disk, as a lazy slice; nothing is read yet.

    Args:
        whole: The lazy slice of the tensor.
        tensor: What it is made of.
        index: Which part.
    """

    def __init__(self, whole: Any, tensor: OnDisk, index: int) -> None:
        self._whole, self._shape = whole, tensor.part_shape
        self._expert: tuple[int, ...] = ()
        if tensor.stacked:
            expert, index = divmod(index, len(tensor.parts) // tensor.shape[0])
            self._expert = (expert,)
        self._first = index * self._shape[0]

    def get_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return self._shape

    def get_dtype(self) -> str:
        """The dtype of the tensor, as safetensors writes it."""
        return self._whole.get_dtype()

    def __getitem__(self, box: Any) -> Tensor:
        rows, *others = box if isinstance(box, tuple) else (box,)
        start, stop, _ = (slice(None) if rows is ... else rows).indices(self._shape[0])
        own = slice(self._first + start, self._first + stop)
        return self._whole[(*self._expert, own, *others)]


def views(whole: Any, tensor: OnDisk) -> Iterable[tuple[str, Any]]:
    """Our name and lazy slice of every part of a tensor on disk."""
    if len(tensor.parts) == 1 and not tensor.stacked:
        yield tensor.parts[0], whole
        return
    for index, name in enumerate(tensor.parts):
        yield name, Part(whole, tensor, index)


class Joiner:
    """Makes tensors of files from their parts, which come in any order.

    Args:
        tensors: All of them.
    """

    def __init__(self, tensors: Iterable[OnDisk]) -> None:
        self._owner = {part: tensor for tensor in tensors for part in tensor.parts}
        self._waiting: dict[str, dict[str, Tensor]] = {}

    def add(self, name: str, part: Tensor) -> tuple[str, Tensor] | None:
        """On-disk name and tensor, if ``part`` was the last that it lacked."""
        tensor = self._owner[name]
        if len(tensor.parts) == 1:
            return tensor.name, part.reshape(tensor.shape)
        held = self._waiting.setdefault(tensor.name, {})
        held[name] = part.clone()  # What is handed over is used again.
        if len(held) < len(tensor.parts):
            return None
        del self._waiting[tensor.name]
        joined = torch.cat([held[part] for part in tensor.parts])
        return tensor.name, joined.view(tensor.shape)
