"""Messages from rank to rank arrive whole, in both directions at once."""

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import LOCAL, Group
from megablocks_core.groups.swaps import message_device, swap
from megablocks_core.testing import ranks


def _message(source, target):
    return torch.full((100_000 * (source + 1) + target,), 10 * source + target).to(torch.uint8)


@ranks(2, 4)
def test_every_rank_to_every_other():
    group = Group.of(dist.group.WORLD)
    others = [rank for rank in range(group.size) if rank != group.rank]
    outgoing = {rank: _message(group.rank, rank) for rank in others}
    expected = {rank: _message(rank, group.rank) for rank in others}
    incoming = {rank: torch.zeros_like(message) for rank, message in expected.items()}
    swap(outgoing, incoming, group=group)
    for rank in others:
        assert torch.equal(incoming[rank], expected[rank])
        assert torch.equal(outgoing[rank], _message(group.rank, rank))


@ranks(4)
def test_some_pairs_of_some_ranks():
    pg = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return
    group = Group.of(pg)
    first, last = 0, group.size - 1
    arrived = torch.zeros(3, dtype=torch.uint8)
    for turn in range(3):
        sent = torch.full((3,), turn + 1, dtype=torch.uint8)
        if group.rank == first:
            swap({last: sent}, {}, group=group)
        elif group.rank == last:
            swap({}, {first: arrived}, group=group)
            assert torch.equal(arrived, sent)


@pytest.mark.parametrize("group", [LOCAL])
def test_a_rank_alone_sends_nothing(group):
    swap({}, {}, group=group)
    assert message_device(group) == torch.device("cpu")


@ranks(2)
def test_messages_over_gloo_lie_on_the_cpu():
    assert message_device(Group.of(dist.group.WORLD)) == torch.device("cpu")
