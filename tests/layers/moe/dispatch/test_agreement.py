"""Ranks that differ raise together, with what differs named; those that agree go on."""

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers.moe.dispatch import AllGatherDispatcher, AllToAllDispatcher
from megablocks_core.layers.moe.dispatch.agreement import REFUSED, agree, number_of
from megablocks_core.parallel import recompute
from megablocks_core.testing import ranks
from tests.layers.moe.dispatch.reference import H, choices, random, routing_of
from tests.traffic import Traffic

CPU = torch.device("cpu")


def test_alone_all_agree():
    with Traffic() as sent:
        agree({"top_k": 2}, groups=[LOCAL], device=CPU)
    assert not sent.counts()


@ranks(4)
def test_numbers_that_differ_anywhere_raise_everywhere():
    """Over two groups, each of which holds two of the four ranks."""
    mesh, rank = Mesh(tp=2, dp=2, ep=2, etp=2), dist.get_rank()
    groups = [mesh.expert.group(axis) for axis in ("etp", "ep")]
    with Traffic() as sent:
        agree({"top_k": 2, "chunks": 1}, groups=groups, device=CPU)
    assert sent.bytes == {"all_reduce": 2 * 2 * 16}
    facts = {"top_k": 2 + (rank == 3), "chunks": 1, "dtype": number_of(torch.float64)}
    with pytest.raises(ValueError, match="^top_k=[23] must be equal .* have from 2 to 3$"):
        agree(facts, groups=groups, device=CPU)
    facts = {"dtype": number_of((torch.bfloat16, torch.int8)[rank // 2])}
    with pytest.raises(ValueError, match="which have from another to torch.bfloat16"):
        agree(facts, groups=groups, device=CPU)
    with pytest.raises(ValueError, match="^a rank refused its arguments"):
        agree({"top_k": 2 * (rank != 1), REFUSED: int(rank == 1)}, groups=groups, device=CPU)


@ranks(2)
@pytest.mark.parametrize("kind", [AllToAllDispatcher, AllGatherDispatcher])
def test_a_dispatch_that_differs_between_ranks_is_refused_on_all(kind):
    """Not sent: messages of unequal sizes end processes. The next call is a clean one."""
    ep, rank = Mesh(dp=2, ep=2).expert.group("ep"), dist.get_rank()
    indices = choices("random", 6, 4, 2)

    def call(x, k=2, num_experts=4):
        routing = routing_of(indices[:, :k], random(6, k), num_experts)
        dispatcher = kind(num_experts=num_experts, ep=ep)
        dispatched, handle = dispatcher.dispatch(x, routing)
        return dispatcher.combine(dispatched.x[dispatched.rows], handle)

    x = random(6, H)
    right = call(x)
    for arguments in (
        {"x": random(6, H + rank)},
        {"x": x.to((torch.float64, torch.float32)[rank])},
        {"x": x, "k": 1 + rank},
        {"x": x, "num_experts": 4 + 2 * rank},
    ):
        with pytest.raises(ValueError, match="must be equal on all ranks"):
            call(**arguments)
        assert torch.equal(call(x), right)


@ranks(2)
def test_a_recomputed_region_does_not_ask_again():
    ep = Mesh(dp=2, ep=2).expert.group("ep")
    dispatcher = AllToAllDispatcher(num_experts=4, ep=ep)
    routing = routing_of(choices("random", 6, 4, 2), random(6, 2), 4)

    def layer(x):
        dispatched, handle = dispatcher.dispatch(x, routing)
        return dispatcher.combine(dispatched.x.sin()[dispatched.rows], handle)

    with Traffic() as sent:
        recompute(layer, random(6, H).requires_grad_()).sum().backward()
    assert sent.counts()["all_reduce"] == 1
