"""Whole tensors dealt out to ranks, and their new values sent to all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megablocks_core.groups import Group
from megablocks_core.groups.messages import all_gather

# Elements of one rank that travel in one message.
_MESSAGE = 1 << 24


def owners_of(
    costs: Sequence[int], num_owners: int, *, loads: Sequence[int] | None = None
) -> list[int]:
    """Deal out things of these costs: the dearest first, each to who has least so far.

    All ranks that know the costs find the same owners.

    Args:
        costs: Of each thing.
        num_owners: How many there are.
        loads: What each owner has already; default nothing.
    """
    loads = [0] * num_owners if loads is None else list(loads)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner = min(range(num_owners), key=lambda rank: loads[rank])
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


@torch.no_grad()
def send_from_owners(tensors: Sequence[Tensor], owners: Sequence[int], *, group: Group) -> None:
    """Fill each tensor, in place, with what its owner holds.

    Sends every element once, in all-gathers of at most some 16 million elements a rank; a longer
    tensor travels alone.

    Args:
        tensors: The same shapes on every rank of ``group``.
        owners: The rank of ``group`` that holds the value of each.
        group: The ranks.
    """
    if group.size == 1:
        return
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            alike.setdefault((tensor.dtype, tensor.device), []).append(index)
    for indices in alike.values():
        for message in _messages(
            [tensors[i].numel() for i in indices], [owners[i] for i in indices]
        ):
            _send(
                [tensors[indices[i]] for i in message], [owners[indices[i]] for i in message], group
            )


def _messages(sizes: Sequence[int], owners: Sequence[int]) -> list[list[int]]:
    """Which tensors travel together: no owner sends much more than others at a time."""
    messages: list[list[int]] = []
    sent: dict[int, int] = {}
    for index, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        place = sent.get(owner, 0) // _MESSAGE
        sent[owner] = sent.get(owner, 0) + size
        messages += [[] for _ in range(place + 1 - len(messages))]
        messages[place].append(index)
    return [message for message in messages if message]


def _send(tensors: Sequence[Tensor], owners: Sequence[int], group: Group) -> None:
    sizes = [0] * group.size
    for tensor, owner in zip(tensors, owners, strict=True):
        sizes[owner] += tensor.numel()
    mine = [t.reshape(-1) for t, owner in zip(tensors, owners, strict=True) if owner == group.rank]
    flat = torch.cat([tensors[0].new_empty(0), *mine])
    parts = all_gather(flat, dim=0, group=group, sizes=sizes).split(sizes)
    at = [0] * group.size
    for tensor, owner in zip(tensors, owners, strict=True):
        values = parts[owner][at[owner] : at[owner] + tensor.numel()]
        at[owner] += tensor.numel()
        if owner != group.rank:
            tensor.copy_(values.view(tensor.shape))
