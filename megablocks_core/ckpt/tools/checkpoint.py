"""A checkpoint as the tools see it: names, shapes, JSON values, and boxes of tensors on demand."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megablocks_core.ckpt.plans.boxes import split, whole_box
from megablocks_core.groups.cuts import Box

# Bytes of a tensor that are read at once; blocks on its edges are read twice.
SLAB_BYTES = 32 * 2**20


class Held(NamedTuple):
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return prod(self.shape) * self.dtype.itemsize

    def slabs(self) -> Iterator[Box]:
        """Boxes of at most ``SLAB_BYTES`` that cover the whole, in row-major order.

        Each is one run of any box of the tensor that it meets.
        """
        yield from split(whole_box(self.shape), SLAB_BYTES // self.dtype.itemsize)


class Checkpoint(Protocol):
    """What the tools ask of a checkpoint.

    Attributes:
        state: What is said of each entry, as in a manifest.
        tensors: By "entry/name".
    """

    state: dict[str, dict[str, Any]]
    tensors: dict[str, Held]

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor, in memory of its own.

        Raises:
            CheckpointError: What is stored is damaged.
        """
        ...

    def beside(self) -> dict[str, bytes]:
        """Files beside the tensors, such as ``config.json``."""
        ...


def read_whole(checkpoint: Checkpoint, name: str) -> Tensor:
    """A whole tensor."""
    return checkpoint.read(name, whole_box(checkpoint.tensors[name].shape))
