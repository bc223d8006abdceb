"""Memory that one call of the scan uses again and again.

Dimensions: n chunks of b rows, q tokens of a chunk, h heads in g groups of j, P features of a
head, N features of a state.
"""

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


class Work:
    """Rooms for a few chunks and heads; those with a "_" are views as batches of matrices.

    Attributes:
        moved: ``unlow dt x`` of each head [n b h q P]; by token [n b g q j P].
        left: What each token adds to the state behind its chunk, but for B [n b g q j P].
        added: What a chunk adds to the state behind it [n b h P N].
        matrix: What a token takes from each earlier one [n b h q q]; by group [n b g j q q].
        met: What it makes of them [n b h q P]; by token [n b g q j P].
        read: What is read from a state [n b g q j P].
    """

    def __init__(self, rooms: Rooms, shape: tuple[int, ...]) -> None:
        n, b, g, q, j, P, N = self.shape = shape
        self.rooms = rooms
        h = g * j
        self.moved, self.moved_ = self.pair("moved", (n, b, h, q, P), q, P)
        self.moved_by_token = self.by_token(self.moved)
        self.left, self.left_ = self.pair("left", (n, b, g, q, j, P), q, j * P)
        self.added, self.added_ = self.pair("added", (n, b, h, P, N), j * P, N)
        self.matrix, self.matrix_ = self.pair("matrix", (n, b, h, q, q), q, q)
        self.matrix_by_group = self.matrix.view(n, b, g, j, q, q)
        self.met, self.met_ = self.pair("met", (n, b, h, q, P), q, P)
        self.met_by_token = self.by_token(self.met)
        self.read, self.read_ = self.pair("read", (n, b, g, q, j, P), q, j * P)

    def pair(self, name: str, shape: tuple[int, ...], *matrix: int) -> tuple[Tensor, Tensor]:
        """A room, and it as a batch of matrices."""
        room = self.rooms.of(name, *shape)
        return room, room.view(-1, *matrix)

    def by_token(self, x: Tensor) -> Tensor:
        """A view [n b g q j P] of [n b h q P]."""
        n, b, g, q, j, P, _ = self.shape
        return x.view(n, b, g, j, q, P).transpose(3, 4)

    def by_group(self, states: Tensor) -> Tensor:
        """States [n b h P N] as a batch of matrices, one of all heads of a group."""
        return states.view(-1, self.left_.shape[-1], states.shape[-1])


def flat(x: Tensor) -> Tensor:
    """A batch of matrices, a view."""
    return x.view(-1, *x.shape[-2:])


def widened(x: Tensor, rooms: Rooms, name: str) -> Tensor:
    """``x`` in the rooms' dtype, itself if it has that."""
    return x if x.dtype == rooms.dtype else rooms.of(name, *x.shape).copy_(x)
