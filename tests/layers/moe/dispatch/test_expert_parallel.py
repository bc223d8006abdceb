"""Results and all gradients equal one process, whoever holds the experts and the tokens."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, Mesh
from megablocks_core.layers.moe.dispatch import AllGatherDispatcher, AllToAllDispatcher
from megablocks_core.layers.moe.dispatch.assignment import Order, copy_slots
from megablocks_core.testing import ranks
from tests.layers.moe.dispatch.reference import (
    Experts,
    H,
    alone,
    choices,
    loss_of,
    random,
    routing_of,
)
from tests.layers.moe.operations import VARYING, Operations

KINDS = [AllToAllDispatcher, AllGatherDispatcher]
# Tokens of each rank.
EVEN = {1: [6], 2: [6, 6], 4: [4, 4, 4, 4]}
UNEVEN = {1: [1], 2: [0, 7], 4: [3, 0, 6, 1]}
_LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]  # ep, etp
_CASES = [
    ("random", 4, 2, UNEVEN),
    ("one expert", 4, 1, EVEN),
    ("all experts", 4, 4, UNEVEN),
    ("ties", 4, 2, UNEVEN),
    ("masked", 8, 3, UNEVEN),
    ("expert choice", 4, 4, EVEN),
    ("random", 4, 2, {1: [0], 2: [0, 0], 4: [0, 0, 0, 0]}),
    ("random", 4, 2, {1: [1], 2: [0, 1], 4: [0, 0, 1, 0]}),
]


def _equal_one_process(kind, cases, *, tp=1, layouts=_LAYOUTS, **options):
    size = dist.get_world_size()
    for ep, etp in layouts:
        if max(tp, ep * etp) <= size and (size == 1 or max(tp, ep, etp) > 1):
            mesh = Mesh(tp=tp, ep=ep, etp=etp)
            for case in cases:
                _equals_one_process(kind, mesh, case, **options)
            mesh.close()


def _equals_one_process(kind, mesh, case, *, capacity=None, chunks=1):
    choice, num_experts, k, tokens = case
    size, tp = mesh.world_size, mesh.size("tp")
    ep, etp, dp = mesh.expert.group("ep"), mesh.expert.group("etp"), mesh.group("dp")
    options = {"tp": mesh.group("tp"), "tokens": "replicated" if tp > 1 else "sharded"}
    dispatcher = kind(num_experts=num_experts, ep=ep, etp=etp, **options)
    lengths = [sum(tokens[size][first : first + tp]) for first in range(0, size, tp)]
    total = sum(lengths)
    indices, x = choices(choice, total, num_experts, k), random(total, 3)
    weights = random(*indices.shape, seed=3) * (indices >= 0)
    capacities = None if capacity is None else [(length, capacity) for length in lengths]
    y, dx, dweights, gradients = alone(x, indices, weights, num_experts, capacities)

    start = sum(lengths[: dp.rank])
    own = slice(start, start + lengths[dp.rank])
    own_x, own_weights = (t[own].clone().requires_grad_() for t in (x, weights))
    experts = Experts(num_experts, experts=dispatcher.experts, etp=etp)
    routing = routing_of(indices[own], own_weights, num_experts, capacity)
    returning = []
    for piece in dispatcher.start_dispatch(own_x, routing, chunks=chunks):
        dispatched, handle = piece.wait()
        returning.append(dispatcher.start_combine(experts(dispatched), handle))
    own_y = dispatcher.finish_combine(returning)
    loss_of(own_y).backward()

    tight = {"rtol": 0, "atol": 1e-10}
    assert_close(own_y.detach(), y[own], **tight)
    assert_close(own_x.grad, dx[own], **tight)
    assert_close(own_weights.grad, dweights[own], **tight)
    edp = mesh.expert.group("edp")
    whole = Experts(num_experts)
    for ours, theirs, cut in zip(
        experts.gradients(), gradients, _cuts(dispatcher, etp, whole), strict=True
    ):
        assert_close(edp.all_reduce(ours), theirs[cut], **tight)
    if kind is AllToAllDispatcher and etp.size == 1 and capacity is None:
        assert torch.equal(own_y, y[own])


def _cuts(dispatcher, etp, whole):
    features = whole.up.shape[-1] // etp.size
    own = slice(etp.rank * features, (etp.rank + 1) * features)
    return (dispatcher.experts, slice(None), own), (dispatcher.experts, own)


@ranks(1, 2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_equal_one_process(kind):
    _equal_one_process(kind, _CASES)


@ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_f082_replicated_tokens_go_once(kind):
    _equal_one_process(kind, _CASES, tp=2)


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_f082_each_of_four_tokens_is_served_once_by_each_expert_it_chose(kind):
    x, indices = random(4, H), choices("random", 4, 4, 2)
    for ep in (1, 2):
        mesh = Mesh(tp=2, ep=ep)
        tp = mesh.group("tp")
        dispatcher = kind(num_experts=4, ep=mesh.expert.group("ep"), tp=tp, tokens="replicated")
        routing = routing_of(indices, torch.ones(4, 2, dtype=torch.float64), 4)
        dispatched, _ = dispatcher.dispatch(x, routing)
        served = torch.zeros(4, dtype=torch.int64)
        served[dispatcher.experts] = dispatched.tokens_per_expert
        assert torch.equal(tp.all_reduce(served), routing.tokens_per_expert)
        mesh.close()


@ranks(1, 2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_capacity_drops_what_one_process_drops(kind):
    masked = [("masked", 4, 2, EVEN)]
    for tp, capacity in ((1, 1), (1, 3), (2, 1), (1, 20)):
        _equal_one_process(kind, masked, tp=tp, capacity=capacity)


@ranks(2, 4)
def test_pieces_equal_one_process():
    layouts = [(2, 1), (2, 2)]
    for tp, cases in ((1, _CASES[-2:]), (2, _CASES[:1])):
        _equal_one_process(AllToAllDispatcher, cases, tp=tp, layouts=layouts, chunks=3)
    masked = [("masked", 4, 2, EVEN)]
    for capacity in (1, 7):
        _equal_one_process(AllToAllDispatcher, masked, layouts=layouts, capacity=capacity, chunks=3)


@pytest.mark.parametrize("kind", KINDS)
def test_f080_experts_that_do_not_divide_are_refused(kind):
    group = Group((0, 1, 2, 3))
    for num_experts in (6, 2):
        with pytest.raises(ValueError, match=f"num_experts={num_experts} must divide evenly .* 4"):
            kind(num_experts=num_experts, ep=group)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_agree_is_refused(kind):
    with pytest.raises(ValueError, match="tokens='both' must be"):
        kind(num_experts=4, ep=LOCAL, tokens="both")
    dispatcher = kind(num_experts=4, ep=LOCAL)
    indices = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="routing of 8 experts must have num_experts=4"):
        dispatcher.dispatch(torch.ones(2, H), routing_of(indices, torch.ones(2, 1), 8))
    with pytest.raises(ValueError, match="routing of 2 tokens must have those of x, 3"):
        dispatcher.dispatch(torch.ones(3, H), routing_of(indices, torch.ones(2, 1), 4))
    with pytest.raises(ValueError, match="chunks=0 must be"):
        routing = routing_of(indices, torch.ones(2, 1), 4)
        dispatcher.start_dispatch(torch.ones(2, H), routing, chunks=0)


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_f084_two_experts_of_a_rank_serve_one_token(kind):
    """w0 f0(x) + w1 f1(x), and rows lie expert after expert."""
    group = Group.of(dist.group.WORLD)
    dispatcher, experts = kind(num_experts=4, ep=group), Experts(4)
    x, weights = random(1, H), torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    pair = torch.tensor([[1, 0]] if group.rank == 0 else [[2, 3]])
    dispatched, handle = dispatcher.dispatch(x, routing_of(pair, weights, 4))
    assert dispatched.tokens_per_expert.tolist() == dispatched.host_counts == [1, 1]
    here = Experts(4, experts=dispatcher.experts)
    y = dispatcher.combine(here(dispatched), handle)
    hidden = torch.stack([(x @ experts.up[e]).tanh() @ experts.down[e] for e in pair[0]])
    assert_close(y, (weights[0, :, None, None] * hidden).sum(0))
    by_weight = [0.75, 0.25] if group.rank == 0 else [0.25, 0.75]
    assert dispatched.weights.tolist() == by_weight


@ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [None, 4])
def test_a_rank_without_gradients_or_use_joins_backward(kind, capacity):
    """Its input needs no gradient, its experts are cold and skip, its result is not used."""
    group = Group.of(dist.group.WORLD)
    dispatcher = kind(num_experts=4, ep=group)
    last = group.rank == group.size - 1
    x = random(3, H, seed=group.rank).requires_grad_(not last)
    indices = torch.zeros(3, 1, dtype=torch.int64)  # all to the first rank
    routing = routing_of(indices, torch.ones(3, 1, dtype=torch.float64), 4, capacity)
    experts = Experts(4, experts=dispatcher.experts)
    for weight in (experts.up, experts.down):
        weight.requires_grad_(not last)
    dispatched, handle = dispatcher.dispatch(x, routing)
    y = dispatcher.combine(experts(dispatched), handle)
    (y[:0].sum() if last else y.sum()).backward()
    assert x.grad is None if last else x.grad.abs().min() > 0
    with torch.no_grad():
        dispatched, handle = dispatcher.dispatch(x, routing)
        assert not dispatcher.combine(experts(dispatched), handle).requires_grad


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_do_not_know_of_each_other(kind):
    """Two dispatches under way at a time, combined in the other order, and one used twice."""
    group = Group.of(dist.group.WORLD)
    dispatcher = kind(num_experts=4, ep=group)
    before = dict(vars(dispatcher))
    calls = []
    for seed in (0, 1):
        x = random(5, H, seed=seed + 10 * group.rank).requires_grad_()
        weights = random(5, 2, seed=seed)
        indices = choices("random", 5, 4, 2).roll(seed, 1)
        calls.append((x, *dispatcher.dispatch(x, routing_of(indices, weights, 4))))
    here = Experts(4, experts=dispatcher.experts)
    ys = [dispatcher.combine(here(d), handle) for _, d, handle in reversed(calls)]
    torch.stack([loss_of(y) for y in ys]).sum().backward()
    for seed, (x, _, _), y in zip((0, 1), calls, reversed(ys), strict=True):
        indices = choices("random", 5, 4, 2).roll(seed, 1)
        right, dx, _, _ = alone(x.detach(), indices, random(5, 2, seed=seed), 4)
        assert_close(y.detach(), right)
        assert_close(x.grad, dx)
    assert vars(dispatcher) == before


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [None, 4])
def test_nothing_nondeterministic_runs(kind, capacity):
    dispatcher = kind(num_experts=4, ep=Group.of(dist.group.WORLD))
    weights = random(6, 2).requires_grad_()
    with Operations() as seen:
        x = random(6, H).requires_grad_()
        routing = routing_of(choices("masked", 6, 4, 2), weights, 4, capacity)
        dispatched, handle = dispatcher.dispatch(x, routing)
        order = Order(dispatched.rows, dispatched.rows, dispatched.places, dispatched.rows)
        (rows,) = copy_slots(dispatched.x, order)
        y = dispatcher.combine(rows * dispatched.weights.unsqueeze(1), handle)
        y.sum().backward()
    assert len(seen.names) > 10 and not seen.names & VARYING
