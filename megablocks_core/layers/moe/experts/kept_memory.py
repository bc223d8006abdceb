"""Memory of gradients that stays with the experts.

Linux clears what it hands out, which for gradients of many experts takes as long as a good part of
their products.
"""

import torch
from torch import Tensor

from megablocks_core.layers.moe.experts.fresh import fresh


class KeptMemory:
    """The memory of each parameter's last gradient, handed out again once nobody has it.

    Copies and pickles of it are empty.
    """

    def __init__(self) -> None:
        self._held: dict[int, torch.UntypedStorage] = {}

    def tensor(self, which: int, like: Tensor) -> Tensor:
        """An uninitialised contiguous tensor like a parameter, known by its number."""
        held = self._held.get(which)
        if held is None or not _fits(held, like):
            self._held[which] = held = fresh(like, *like.shape).untyped_storage()
        return like.new_empty(0).set_(held, 0, like.shape)

    def __reduce__(self) -> tuple[type["KeptMemory"], tuple[()]]:
        return KeptMemory, ()


def _fits(held: torch.UntypedStorage, like: Tensor) -> bool:
    """Whether a parameter's gradient may lie there, and no tensor, view or alias does."""
    alone = torch._C._storage_Use_Count(held._cdata) == 1
    return alone and held.nbytes() == like.nbytes and held.device == like.device
