"""The weights of one bucket in one piece of memory, of which each rank owns an equal shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from megablocks_core.groups import Group
from megablocks_core.groups.buffers import Handle, start_all_gather_
from megablocks_core.parallel.data_parallel.buckets import Bucket


class OwnRange(NamedTuple):
    """What a rank owns of one parameter; may be empty.

    Attributes:
        index: The parameter's number.
        start: The first of its elements, flattened.
        offset: Where they lie in the rank's shard.
        length: How many.
    """

    index: int
    start: int
    offset: int
    length: int


def own_ranges(bucket: Bucket, group: Group) -> Iterator[OwnRange]:
    """What this rank of ``group`` owns of each parameter of a bucket."""
    first, last = bucket.shard(group.rank)
    for index, start, stop in bucket.slots:
        low, high = max(start, first), min(stop, last)
        if low < high:
            yield OwnRange(index, low - start, low - first, high - low)
        else:
            yield OwnRange(index, 0, 0, 0)


class FlatParameters:
    """Makes the parameters of a bucket views of one buffer; they stay the same objects.

    Over a group of one there is no buffer, and nothing is copied or sent.

    Args:
        bucket: Where each parameter lies in the buffer.
        parameters: By index.
        group: The ranks, each of which owns a shard.

    Attributes:
        bucket: The same.
        group: The same.
        ranges: What this rank owns of each parameter.
        parameters: Those of the bucket, by index.
    """

    @torch.no_grad()
    def __init__(self, bucket: Bucket, parameters: Sequence[nn.Parameter], *, group: Group) -> None:
        self.bucket, self.group = bucket, group
        self.ranges = list(own_ranges(bucket, group))
        self.parameters = {slot.index: parameters[slot.index] for slot in bucket.slots}
        self._flat: Tensor | None = None
        if group.size > 1:
            self._flat = torch.empty(bucket.length, dtype=bucket.dtype, device=bucket.device)
            end = 0
            for index, start, end in bucket.slots:
                parameter = self.parameters[index]
                parameter.data = self._flat[start:end].view(parameter.shape).copy_(parameter)
            self._flat[end:] = 0
        else:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.contiguous()
        self._places = [parameter.data_ptr() for parameter in self.parameters.values()]

    def weight(self, own: OwnRange) -> Tensor:
        """The memory of what this rank owns of a parameter, of one dimension."""
        whole = self.parameters[own.index].detach().view(-1)
        return whole[own.start : own.start + own.length]

    def start_gather(self) -> Handle | None:
        """Start to send this rank's shard to all, and to receive theirs.

        A graph that saved the old weights then refuses to run backward, as with any optimizer.
        """
        if self._flat is None:
            return None
        increment_version(list(self.parameters.values()))
        first, last = self.bucket.shard(self.group.rank)
        return start_all_gather_(self._flat, self._flat[first:last], group=self.group)

    def moved(self) -> int | None:
        """The index of a parameter whose memory is no longer the buffer's, if there is one."""
        for place, (index, parameter) in zip(self._places, self.parameters.items(), strict=True):
            if parameter.data_ptr() != place:
                return index
        return None
