"""Products of a head's matrices, a block at a time, in memory that is used again.

Memory that is fresh from the system costs a CPU as much time as the product that fills it.
"""

from functools import cache

import torch
from torch import Tensor


class Products:
    """Products whose factors and results may be of 16 bits, while their sums are wider.

    They add up in float32 inside. On a GPU narrow factors come out of that unrounded; on a CPU
    each result is rounded once to 16 bits, as that of ``torch.mm`` is.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def factor(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` in another dtype, until the next factor of this name."""
        if x.dtype == dtype or x.device.type != "cpu":
            return x.to(dtype)
        return self._room(name, x, dtype).copy_(x)

    def put(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        """Put ``a @ b`` in ``out``; both factors are of one dtype."""
        if a.dtype == out.dtype:
            torch.mm(a, b, out=out)
        else:
            out.copy_(self._narrow(out, a, b))

    def add(self, total: Tensor, a: Tensor, b: Tensor, *, fresh: bool = False) -> None:
        """Add ``a @ b`` to ``total``, or put it there if nothing is yet."""
        if a.dtype == total.dtype:
            total.addmm_(a, b, beta=0.0 if fresh else 1.0)
        elif fresh:
            self.put(total, a, b)
        else:
            total.add_(self._narrow(total, a, b))

    def _narrow(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if a.is_cuda:
            return torch.mm(a, b, out_dtype=out.dtype)
        return torch.mm(a, b, out=self._room("product", out, a.dtype))

    def _room(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        room = self._rooms.get(name)
        if room is None or room.dtype != dtype or room.numel() < like.numel():
            room = self._rooms[name] = like.new_empty(like.numel(), dtype=dtype)
        return room[: like.numel()].view(like.shape)


def stays_narrow(x: Tensor) -> bool:
    """Whether there are instructions for products of factors of 16 bits as they are."""
    if x.device.type == "cpu":
        return x.dtype == torch.bfloat16 and _cpu_multiplies_bfloat16()
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


@cache
def _cpu_multiplies_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
