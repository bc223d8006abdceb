"""All tokens come to every rank, which works on those of its experts."""

import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.moe.dispatch import AllGatherDispatcher
from megablocks_core.layers.moe.dispatch.assignment import Order, copy_slots
from megablocks_core.testing import ranks
from tests.layers.moe.dispatch.reference import H, choices, loss_of, random, routing_of


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


@ranks(2)
def test_it_compiles_as_one_graph_without_a_read():
    """Where ranks hold equally many tokens; other routings do not compile again."""
    dispatcher = AllGatherDispatcher(num_experts=4, ep=Mesh(dp=2, ep=2).expert.group("ep"))

    def layer(x, weights, indices):
        dispatched, handle = dispatcher.dispatch(x, routing_of(indices, weights, 4))
        order = Order(dispatched.rows, dispatched.rows, dispatched.places, dispatched.rows)
        (rows,) = copy_slots(dispatched.x, order)
        return dispatcher.combine(rows.tanh() * dispatched.weights.unsqueeze(1), handle)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for seed in range(3):
        x, weights = random(6, H, seed=seed).requires_grad_(), random(6, 2).requires_grad_()
        indices = (choices("masked", 6, 4, 2) + seed) % 4
        ours, theirs = (
            torch.autograd.grad(loss_of(call(x, weights, indices)), (x, weights))
            for call in (compiled, layer)
        )
        assert_close(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
