"""What is made while a piece of code runs."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """What is made while on: the largest storage, how many products, and every tensor."""

    def __init__(self):
        super().__init__()
        self.largest, self.products, self.made = 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
            self.made.append(weakref.ref(result))
        return result


class Operations(TorchDispatchMode):
    """The names of all operations while on, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    def count(self, *parts):
        """How many have one of ``parts`` in their name."""
        return sum(any(part in name for part in parts) for name in self.names)
