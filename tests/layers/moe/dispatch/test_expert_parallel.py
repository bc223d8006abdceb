"""Results and all gradients equal one process, whoever holds the experts and the tokens."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.moe.dispatch import AllGatherDispatcher, AllToAllDispatcher
from megablocks_core.testing import ranks
from tests.layers.moe.dispatch.reference import Experts, alone, choices, loss_of, random, routing_of

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
        if ep * etp <= size and tp <= size:
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
    lengths = tokens[size] if tp == 1 else tokens[size][::tp]
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


@ranks(1, 2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_capacity_drops_what_one_process_drops(kind):
    for tp in (1, 2):
        for capacity in (1, 3, 20):
            case = ("masked", 4, 2, EVEN)
            _equal_one_process(kind, [case], tp=tp, capacity=capacity)


@ranks(2, 4)
def test_pieces_equal_one_process():
    for chunks in (2, 3):
        _equal_one_process(AllToAllDispatcher, _CASES[-3:], chunks=chunks)
        _equal_one_process(AllToAllDispatcher, _CASES[:5], tp=2, chunks=chunks)
        for capacity in (1, 7):
            cases = [("masked", 4, 2, EVEN)]
            _equal_one_process(AllToAllDispatcher, cases, capacity=capacity, chunks=chunks)
