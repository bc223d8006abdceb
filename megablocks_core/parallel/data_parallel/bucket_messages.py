"""How one bucket's gradients are summed over the ranks: one or two messages, one after another.

N ranks, L elements in the bucket, l = L / N of them this rank's share.

    ================  =======================================  ========================
    message           sends                                    leaves
    ================  =======================================  ========================
    WholeMessage      all-reduce of L                          the sum in the buffer
    ... wire dtype    all-to-all of L, all-gather of L, both   the rounded sum there
                      in 16 bits; the sum is in float32
    ShardMessage      reduce-scatter of L, then all-reduce     the share's sum in ``own``
                      of l over ``replicate``
    ================  =======================================  ========================

A message starts when it is made. ``go_on`` waits for its first part and starts the second;
``finish`` waits for all. The buffer is neither read nor written in between.

``UsedFlags`` says which parameters any rank used: an all-reduce of a byte for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group
from megablocks_core.groups.buffers import (
    Handle,
    start_all_gather_,
    start_all_reduce_,
    start_reduce_scatter_,
)


class BucketMessage:
    """A message of one bucket."""

    _handle: Handle

    def has_arrived(self) -> bool:
        """Whether its latest part is here, as far as is known."""
        return self._handle.has_arrived()


class WholeMessage(BucketMessage):
    """Sum ``flat`` [L] over ``group``, in place."""

    def __init__(self, flat: Tensor, *, group: Group, wire_dtype: torch.dtype | None) -> None:
        self._flat, self._group = flat, group
        self._wire: Tensor | None = None
        if wire_dtype is None or wire_dtype == flat.dtype or group.size == 1:
            self._handle = start_all_reduce_(flat, group=group)
        else:
            self._wire = flat.to(wire_dtype)
            self._handle = start_reduce_scatter_(self._own(flat), self._wire, group=group)

    def go_on(self) -> None:
        """Start the second part, if there is one."""
        if self._wire is not None:
            self._handle.wait()
            own = self._own(self._wire).copy_(self._own(self._flat))
            self._handle = start_all_gather_(self._wire, own, group=self._group)

    def finish(self) -> None:
        """Return when the sum stands in the buffer."""
        self._handle.wait()
        if self._wire is not None:
            self._flat.copy_(self._wire)

    def _own(self, flat: Tensor) -> Tensor:
        return flat.chunk(self._group.size)[self._group.rank]


class ShardMessage(BucketMessage):
    """Sum ``flat`` [L] over ``group``, each rank its share, and that over ``replicate``.

    Attributes:
        own: This rank's share [l], once finished.
    """

    def __init__(
        self,
        flat: Tensor,
        *,
        group: Group,
        replicate: Group = LOCAL,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._replicate = replicate
        self.own = flat.new_empty(flat.numel() // group.size)
        self._handle = start_reduce_scatter_(
            self.own, flat.to(wire_dtype or flat.dtype), group=group
        )

    def go_on(self) -> None:
        """Start the second part, if there is one."""
        if self._replicate.size > 1:
            self._handle.wait()
            self._handle = start_all_reduce_(self.own, group=self._replicate)

    def finish(self) -> None:
        """Return when ``own`` is the sum."""
        self._handle.wait()


class UsedFlags:
    """Which parameters have a gradient on any rank.

    Args:
        own: For each bucket's number, whether this rank has a gradient of each parameter.
        group: The ranks that share the parameters.
        replicate: Ranks that hold copies of their shards.
        device: Where ``group`` communicates.
    """

    def __init__(
        self,
        own: Mapping[int, Sequence[bool]],
        *,
        group: Group,
        replicate: Group = LOCAL,
        device: torch.device,
    ) -> None:
        self._own, self._group, self._replicate = own, group, replicate
        flat = [flag for flags in own.values() for flag in flags]
        self._flags = torch.tensor(flat, dtype=torch.uint8, device=device)
        self._handle = self._start(group)
        self._arrived = False

    def of(self, number: int) -> Sequence[bool]:
        """For each parameter of a bucket, whether any rank has a gradient."""
        if all(self._own[number]):
            return self._own[number]  # known without waiting for a device
        self.wait()
        sizes = [len(flags) for flags in self._own.values()]
        place = list(self._own).index(number)
        return self._flags.split(sizes)[place].bool().tolist()

    def wait(self) -> None:
        """Return when all ranks' flags have come."""
        if not self._arrived:
            self._handle.wait()
            self._start(self._replicate).wait()
            self._arrived = True

    def _start(self, group: Group) -> Handle:
        return start_all_reduce_(self._flags, group=group, op="max")
