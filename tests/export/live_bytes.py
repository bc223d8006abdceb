"""Counts the memory that tensors take while something runs."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The most bytes that live at a time in memory that is taken inside.

    Args:
        known: Tensors whose memory does not count.

    Attributes:
        peak: So many bytes.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.peak, self._live = 0, {}
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return made
