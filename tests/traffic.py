"""What ranks send each other, by kind of message."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "c10d::allreduce_": "all_reduce",
}


class Traffic(TorchDispatchMode):
    """Records messages: the elements of each, of the whole tensor, gathered or not yet cut.

    ``bytes`` are those of all messages of a kind.
    """

    def __init__(self):
        super().__init__()
        self.sizes, self.bytes = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        kind = _KINDS.get(func._schema.name)
        if kind is not None:
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
            largest = max(tensors, key=torch.Tensor.numel)
            self.sizes.setdefault(kind, []).append(largest.numel())
            self.bytes[kind] = self.bytes.get(kind, 0) + largest.nbytes
        return result

    def counts(self):
        """The number of messages."""
        return {kind: len(sizes) for kind, sizes in self.sizes.items()}

    def totals(self):
        """The number of messages and of their elements."""
        return {kind: (len(sizes), sum(sizes)) for kind, sizes in self.sizes.items()}

    def sorted_sizes(self):
        """The elements of each message, in ascending order."""
        return {kind: sorted(sizes) for kind, sizes in self.sizes.items()}
