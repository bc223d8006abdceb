"""Host memory that is used again, step after step."""

from collections import deque
from threading import Lock

import torch
from torch import Tensor

from megablocks_core.groups.copies import Copies

_ROUND = 512


class HostBuffers:
    """A store of host buffers that ``offload`` borrows; make one, and use it in every step.

    A buffer goes back when the graph that needed it is gone. A request takes the smallest free
    one of up to twice its size, else a new one; buffers for CUDA are pinned. Those of one
    object are copied to and from on one stream.

    Attributes:
        copies: How data come and go.
        allocated: Bytes of all buffers.
    """

    def __init__(self) -> None:
        self.copies = Copies()
        self.allocated = 0
        self._free: dict[bool, list[Tensor]] = {False: [], True: []}
        # A buffer may come back at any moment, in any thread.
        self._back: deque[tuple[Tensor, bool]] = deque()
        self._lock = Lock()

    @property
    def free(self) -> int:
        """Bytes of the buffers that nobody needs."""
        with self._lock:
            self._sort_in()
            return sum(len(buffer) for buffers in self._free.values() for buffer in buffers)

    def take(self, size: int, *, pinned: bool = False) -> "Loan":
        """Borrow ``size`` bytes, for as long as the loan lives."""
        with self._lock:
            self._sort_in()
            fits = [b for b in self._free[pinned] if size <= len(b) <= 2 * max(size, _ROUND)]
            if fits:
                buffer = min(fits, key=len)
                self._free[pinned] = [b for b in self._free[pinned] if b is not buffer]
            else:
                length = -(-size // _ROUND) * _ROUND
                buffer = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)
                self.allocated += length
        return Loan(buffer, size, pinned, self._back)

    def _sort_in(self) -> None:
        while self._back:
            buffer, pinned = self._back.popleft()
            self._free[pinned].append(buffer)


class Loan:
    """Bytes of a buffer, given back when this object dies.

    Attributes:
        bytes: What was borrowed, uint8.
    """

    def __init__(
        self, buffer: Tensor, size: int, pinned: bool, back: "deque[tuple[Tensor, bool]]"
    ) -> None:
        self.bytes = buffer[:size]
        self._home, self._back = (buffer, pinned), back

    def __del__(self) -> None:
        self._back.append(self._home)
