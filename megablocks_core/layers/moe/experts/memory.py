"""Where experts get memory for what is large: gradients, results, and what backward reads.

Linux clears what it hands out, which on a CPU may take as long as a good part of the products.
"""

import math
from threading import Lock

import torch
from torch import Tensor

from megablocks_core.layers.moe.experts.fresh import fresh


class Memory:
    """Fresh memory."""

    keeps = False

    def tensor(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised contiguous tensor with dtype and device of ``like``."""
        return fresh(like, *shape)


FRESH = Memory()


class KeptMemory(Memory):
    """Memory that is handed out again under the same name, once nobody has it.

    That of other devices than the CPU is always fresh: their streams may read what Python has
    dropped. Copies and pickles of this are empty.
    """

    keeps = True

    def __init__(self) -> None:
        self._held: dict[str, torch.UntypedStorage] = {}
        self._lock = Lock()  # else two threads may find the same memory free

    def tensor(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """That of the last tensor of this name, if it is free and large enough."""
        if like.device.type != "cpu":
            return fresh(like, *shape)
        with self._lock:
            held = self._held.get(name)
            if held is None or not _fits(held, math.prod(shape) * like.itemsize):
                self._held[name] = held = fresh(like, *shape).untyped_storage()
            tensor = like.new_empty(0)
            return tensor.set_(held, 0, shape)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __reduce__(self) -> tuple[type["KeptMemory"], tuple[()]]:
        return KeptMemory, ()


def _fits(held: torch.UntypedStorage, nbytes: int) -> bool:
    """Whether so many bytes fit there, and no tensor, view or alias lies there."""
    alone = torch._C._storage_Use_Count(held._cdata) == 1
    return alone and held.nbytes() >= nbytes
