"""Pieces of any dtype, shape and strides arrive in the memory meant for them."""

import torch
import torch.distributed as dist

from megablocks_core.ckpt.transfer.exchange import Exchange
from megablocks_core.groups import Group
from megablocks_core.testing import ranks


def _pieces(source, target):
    start = 10 * source + target
    return [
        torch.arange(start, start + 5, dtype=torch.uint8),
        torch.full((), float(start), dtype=torch.float64),
        torch.arange(6.0).view(2, 3).T + start,
        torch.zeros(0, 4, dtype=torch.int64),
        torch.tensor([True, False, True]),
        torch.full((3, 1), start, dtype=torch.bfloat16),
    ]


@ranks(2, 4)
def test_pieces_between_all_ranks():
    group = Group.of(dist.group.WORLD)
    others = [rank for rank in range(group.size) if rank != group.rank]
    incoming = {
        rank: [torch.zeros_like(one) for one in _pieces(rank, group.rank)] for rank in others
    }
    exchange = Exchange({rank: _pieces(group.rank, rank) for rank in others}, incoming, group=group)
    exchange.send()
    exchange.unpack()
    for rank in others:
        for piece, expected in zip(incoming[rank], _pieces(rank, group.rank), strict=True):
            assert torch.equal(piece, expected) and piece.dtype == expected.dtype


@ranks(4)
def test_strided_memory_is_filled_and_replicas_share_a_message():
    group = Group.of(dist.group.WORLD)
    whole = torch.zeros(4, 6)
    if group.rank == 0:
        pieces = [torch.arange(8.0).view(4, 2), torch.ones(3)]
        exchange = Exchange(dict.fromkeys((1, 2, 3), pieces), {}, group=group)
        assert len({one.data_ptr() for one in exchange._outgoing.values()}) == 1
    else:
        column, other = whole[:, 3:5], torch.zeros(3)
        exchange = Exchange({}, {0: [column, other]}, group=group)
    exchange.send()
    exchange.unpack()
    if group.rank:
        expected = torch.zeros(4, 6)
        expected[:, 3:5] = torch.arange(8.0).view(4, 2)
        assert torch.equal(whole, expected) and torch.equal(other, torch.ones(3))
