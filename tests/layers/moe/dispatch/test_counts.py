"""Every rank learns how many rows come to each of its experts."""

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers.moe.dispatch.counts import Counts, check_equal
from megablocks_core.testing import ranks


def sent_by(rank):
    """Two pieces, four experts: numbers that tell rank, piece and expert."""
    return 100 * rank + torch.arange(8).view(2, 4)


def test_alone_what_is_sent_is_what_comes():
    counts = Counts(sent_by(0), capacity=None, ep=LOCAL, etp=LOCAL)
    assert counts.received.shape == (2, 1, 1, 4)
    sent, received = counts.on_host()
    assert sent == received == list(range(8))


@ranks(2)
def test_each_rank_gets_those_of_its_experts_from_all():
    ep = Mesh(ep=2).expert.group("ep")
    counts = Counts(sent_by(ep.rank), capacity=None, ep=ep, etp=LOCAL)
    own = slice(2 * ep.rank, 2 * ep.rank + 2)
    for piece in range(2):
        for source in range(2):
            expected = sent_by(source)[piece, own]
            assert torch.equal(counts.received[piece, 0, source], expected)
    sent, received = counts.on_host()
    assert sent == sent_by(ep.rank).flatten().tolist()
    assert received == counts.received.flatten().tolist()


@ranks(2)
def test_a_capacity_on_one_rank_alone_is_refused_on_all():
    ep = Mesh(ep=2).expert.group("ep")
    capacity = 3 if dist.get_rank() else None
    with pytest.raises(ValueError, match="capacity must be"):
        Counts(sent_by(0), capacity=capacity, ep=ep, etp=LOCAL).on_host()


def test_values_that_differ_are_named():
    check_equal(torch.tensor([2, 2]), "capacity")
    with pytest.raises(ValueError, match="capacity must be equal on all ranks, which have 2, None"):
        check_equal(torch.tensor([2, -1]), "capacity")
