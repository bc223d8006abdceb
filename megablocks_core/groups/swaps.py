"""Messages from rank to rank, all of them at once, outside autograd."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megablocks_core.groups.group import Group


def swap(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], *, group: Group) -> None:
    """Send a tensor to each of some ranks, while theirs are received in place.

    Returns when all have arrived and left. Every pair sends at most one message each way; both
    must know its size. Ranks without messages need not call it.

    Args:
        outgoing: By rank within ``group``: contiguous, on ``message_device(group)``.
        incoming: By rank within ``group``: the memory to fill, likewise.
        group: The ranks.
    """
    messages = [
        dist.P2POp(call, tensor, group.ranks[rank], group.pg)
        for call, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
        for rank, tensor in sorted(tensors.items())
        if tensor.numel()
    ]
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()


def on_any(flag: bool, *, group: Group) -> bool:
    """Whether ``flag`` is set on any rank, all of which call it; a message of one word."""
    if group.size == 1:
        return flag
    word = torch.tensor(int(flag), dtype=torch.int32, device=message_device(group))
    dist.all_reduce(word, op=dist.ReduceOp.MAX, group=group.pg)
    return bool(word)


def message_device(group: Group) -> torch.device:
    """Where ``swap`` wants its tensors: on the CPU if the group serves it, else on this GPU."""
    if group.size == 1 or group.pg is None:
        return torch.device("cpu")
    kinds = {device.type for device in group.pg._device_types}
    return torch.device("cpu" if "cpu" in kinds else min(kinds))
