"""All tokens come to every rank, which works on those of its experts."""

import torch
import torch.distributed as dist

from megablocks_core.groups import Mesh
from megablocks_core.layers.moe.dispatch import AllGatherDispatcher
from megablocks_core.testing import ranks
from tests.layers.moe.dispatch.reference import random, routing_of


@ranks(2)
def test_rows_are_of_the_experts_here_in_the_order_of_all_tokens():
    ep, rank = Mesh(ep=2).expert.group("ep"), dist.get_rank()
    indices = [torch.tensor([[0, 3], [1, 2]]), torch.tensor([[3, 1]])][rank]  # uneven ranks
    x = random(len(indices), 4, seed=rank)
    dispatcher = AllGatherDispatcher(num_experts=4, ep=ep)
    weights = torch.ones(indices.shape, dtype=torch.float64)
    dispatched, handle = dispatcher.dispatch(x, routing_of(indices, weights, 4))
    whole = torch.cat([random(2, 4, seed=0), random(1, 4, seed=1)])
    assert torch.equal(dispatched.x, whole)
    counts = [[1, 2], [1, 2]][rank]
    assert dispatched.tokens_per_expert.tolist() == counts
    filled = dispatched.rows[: sum(counts)].tolist()
    assert filled == [[0, 1, 2], [1, 0, 2]][rank]
    y = dispatcher.combine(dispatched.x[dispatched.rows.clamp(min=0)], handle)
    assert torch.equal(y, 2 * x)  # each token went to two experts, which gave it back
