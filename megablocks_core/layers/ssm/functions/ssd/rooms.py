"""Memory that one call of the scan uses again and again."""

from math import prod

import torch
from torch import Tensor


class Rooms:
    """Named tensors of one dtype and device, whose memory stays from one use to the next.

    Memory that is fresh from the system costs a CPU as much time as the product that fills it.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self.dtype = like, dtype
        self._rooms: dict[str, Tensor] = {}

    def of(self, name: str, *shape: int) -> Tensor:
        """A contiguous tensor with anything in it, until the next one of this name."""
        size, room = prod(shape), self._rooms.get(name)
        if room is None or room.numel() < size:
            room = self._rooms[name] = self._like.new_empty(size, dtype=self.dtype)
        return room[:size].view(shape)

    def wide(self, name: str, x: Tensor) -> Tensor:
        """``x`` in the rooms' dtype, itself if it has that."""
        return x if x.dtype == self.dtype else self.of(name, *x.shape).copy_(x)
