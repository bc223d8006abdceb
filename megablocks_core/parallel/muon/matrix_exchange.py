"""Many cut matrices brought together on their owners, or on all ranks, and cut again.

One message for all matrices of a call: who sends what follows from the cuts, so no sizes are
learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import Group, ShardSpec
from megablocks_core.groups.messages import all_gather, start_all_to_all, wait


class Cut(NamedTuple):
    """One cut of one matrix.

    Attributes:
        spec: The cut, of dimension 0 or 1.
        shape: Of what it cuts.
    """

    spec: ShardSpec
    shape: tuple[int, ...]

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """Shape of the share of a rank of the group."""
        shape = list(self.shape)
        shape[self.spec.dim] = self.spec.held_length(shape[self.spec.dim], rank)
        return tuple(shape)

    def share_of(self, whole: Tensor, rank: int) -> Tensor:
        """The share of a rank of the group, in the order in which it is stored."""
        dim = self.spec.dim
        parts = [
            whole.narrow(dim, part.start, part.stop - part.start)
            for part in self.spec.ranges(self.shape[dim], rank)
        ]
        return torch.cat(parts, dim)

    def whole_of(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole, from the shares of all ranks."""
        dim = self.spec.dim
        whole = shares[0].new_empty(self.shape)
        for rank, share in enumerate(shares):
            start = 0
            for part in self.spec.ranges(self.shape[dim], rank):
                length = part.stop - part.start
                whole.narrow(dim, part.start, length).copy_(share.narrow(dim, start, length))
                start += length
        return whole


def join_on_all(shares: Sequence[Tensor], cuts: Sequence[Cut], *, group: Group) -> list[Tensor]:
    """The wholes of all matrices, on every rank; one all-gather.

    Args:
        shares: This rank's, of one dtype.
        cuts: Theirs, all over ``group``.
        group: The ranks.
    """
    sizes = [sum(_size(cut, rank) for cut in cuts) for rank in range(group.size)]
    flat = all_gather(_flat(shares), dim=0, group=group, sizes=sizes)
    received = [_apart(part, cuts, rank) for rank, part in enumerate(flat.split(sizes))]
    return [cut.whole_of(parts) for cut, *parts in zip(cuts, *received, strict=True)]


def join_on_owners(
    shares: Sequence[Tensor], cuts: Sequence[Cut], owners: Sequence[int], *, group: Group
) -> list[Tensor]:
    """The wholes of the matrices that this rank owns, in their order; one all-to-all.

    Args:
        shares: This rank's, of one dtype.
        cuts: Theirs, all over ``group``.
        owners: The rank of ``group`` that gets each.
        group: The ranks.
    """
    by_owner = _by_owner(owners, group)
    mine = [cuts[index] for index in by_owner[group.rank]]
    flat = _exchanged(
        [shares[index] for indices in by_owner for index in indices],
        send=[sum(_size(cuts[index], group.rank) for index in indices) for indices in by_owner],
        receive=[sum(_size(cut, rank) for cut in mine) for rank in range(group.size)],
        like=shares[0],
        group=group,
    )
    received = [_apart(part, mine, rank) for rank, part in enumerate(flat)]
    return [cut.whole_of(parts) for cut, *parts in zip(mine, *received, strict=True)]


def divide_from_owners(
    wholes: Sequence[Tensor],
    cuts: Sequence[Cut],
    owners: Sequence[int],
    *,
    like: Tensor,
    group: Group,
) -> list[Tensor]:
    """The reverse of ``join_on_owners``: this rank's shares of all matrices; one all-to-all.

    Args:
        wholes: Of the matrices that this rank owns, in their order.
        cuts: Of all matrices.
        owners: As before.
        like: A tensor of their dtype and device, as this rank may own none.
        group: The ranks.
    """
    by_owner = _by_owner(owners, group)
    mine = [cuts[index] for index in by_owner[group.rank]]
    flat = _exchanged(
        [
            cut.share_of(whole, rank)
            for rank in range(group.size)
            for cut, whole in zip(mine, wholes, strict=True)
        ],
        send=[sum(_size(cut, rank) for cut in mine) for rank in range(group.size)],
        receive=[sum(_size(cuts[index], group.rank) for index in indices) for indices in by_owner],
        like=like,
        group=group,
    )
    found: dict[int, Tensor] = {}
    for indices, part in zip(by_owner, flat, strict=True):
        shares = _apart(part, [cuts[index] for index in indices], group.rank)
        found.update(zip(indices, shares, strict=True))
    return [found[index] for index in range(len(cuts))]


def _by_owner(owners: Sequence[int], group: Group) -> list[list[int]]:
    return [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(group.size)]


def _size(cut: Cut, rank: int) -> int:
    return math.prod(cut.shape_on(rank))


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _apart(flat: Tensor, cuts: Sequence[Cut], rank: int) -> list[Tensor]:
    """The shares of one rank that lie in one flat tensor."""
    parts = flat.split([_size(cut, rank) for cut in cuts])
    return [part.view(cut.shape_on(rank)) for part, cut in zip(parts, cuts, strict=True)]


def _exchanged(
    tensors: Sequence[Tensor],
    *,
    send: list[int],
    receive: list[int],
    like: Tensor,
    group: Group,
) -> tuple[Tensor, ...]:
    flat = _flat([like.new_empty(0), *tensors])
    return wait(start_all_to_all(flat, receive=receive, send=send, group=group)).split(receive)
