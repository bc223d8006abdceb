"""The one place where numbers of the device become integers of the host."""

import torch
from torch import Tensor

from megablocks_core.parallel import remember


def read_counts(counts: Tensor) -> list[int]:
    """The values of an integer tensor, in order; a recomputed region reads none again."""
    return remember(lambda: HostRead(counts).values())


class HostRead:
    """A copy to the host that is under way; ``values`` waits for it.

    Args:
        counts: An integer tensor, which must not be changed before ``values`` returns.
    """

    def __init__(self, counts: Tensor) -> None:
        self._values: list[int] | None = None
        self._event = None
        self._counts = counts.reshape(-1)
        if counts.is_cuda:
            host = torch.empty(self._counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts = host.copy_(self._counts, non_blocking=True)
            self._event = torch.cuda.current_stream(counts.device).record_event()

    def values(self) -> list[int]:
        """The integers; a second call waits for nothing."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._counts.tolist()
        return self._values
