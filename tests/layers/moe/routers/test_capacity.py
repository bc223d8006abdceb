"""Beyond an expert's capacity tokens are dropped, by weight or by place."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe import Capacity, TopKRouter, capacity_of, limit, route_top_k
from megablocks_core.layers.moe.routing import NOWHERE
from megablocks_core.parallel import recompute

T, E = 20, 4


def naive(routing, capacity, drop):
    """Which slots stay, expert by expert."""
    kept = torch.zeros_like(routing.indices, dtype=torch.bool)
    for expert in range(E):
        slots = [tuple(slot) for slot in (routing.indices == expert).nonzero().tolist()]
        if drop == "weight":
            slots.sort(key=lambda slot: (-routing.weights[slot].item(), slot))
        for slot in slots[:capacity]:
            kept[slot] = True
    return kept


@pytest.mark.parametrize("drop", ["weight", "position"])
@pytest.mark.parametrize("capacity", [0, 1, 5, 40])
@pytest.mark.parametrize("ties", [False, True])
def test_what_stays_is_what_a_loop_keeps(drop, capacity, ties):
    logits = torch.randint(0, 3, (T, E)).float() if ties else torch.randn(T, E)
    whole = route_top_k(logits.requires_grad_(), top_k=2, mask=torch.arange(T) % 5 > 0)
    kept = naive(whole, capacity, drop)
    routing = limit(whole, capacity=capacity, drop=drop)
    assert torch.equal(routing.indices, torch.where(kept, whole.indices, NOWHERE))
    assert torch.equal(routing.weights, torch.where(kept, whole.weights, 0))
    assert routing.tokens_per_expert is whole.tokens_per_expert and routing.capacity == capacity
    assert limit(whole, capacity=capacity, drop=drop, pad=False).capacity is None
    routing.weights.sum().backward()
    dropped = ~(kept.any(1))
    assert not logits.grad[dropped].any()


def test_capacities_follow_from_sizes():
    assert capacity_of(10, top_k=2, num_experts=8, factor=1.0) == 3
    assert capacity_of(10, top_k=2, num_experts=8, factor=100.0) == 10
    assert capacity_of(0, top_k=2, num_experts=8, factor=1.0) == 0


def test_a_router_limits_what_it_routes():
    router = TopKRouter(6, num_experts=E, top_k=2, capacity=Capacity(0.5, drop="position"))
    x = torch.randn(T, 6)
    whole = route_top_k(router.logits(x), top_k=2)
    expected = limit(whole, capacity=5, drop="position")
    for ours, theirs in zip(router(x), expected, strict=True):
        assert_close(ours, theirs)
    assert Capacity(1.0, pad=False).limit(whole).capacity is None


@pytest.mark.parametrize("factor", [0.3, 0.5, 1.0, 7.0])
def test_pads_change_neither_what_is_dropped_nor_how_many(factor):
    logits, count = torch.randn(T, E), 7
    mask = torch.arange(T) < count
    alone = Capacity(factor).limit(route_top_k(logits[:count], top_k=2))
    padded = Capacity(factor).limit(route_top_k(logits, top_k=2, mask=mask))
    assert torch.equal(padded.indices[:count], alone.indices)
    assert_close(padded.weights[:count], alone.weights)
    assert padded.capacity == capacity_of(T, top_k=2, num_experts=E, factor=factor)


def test_a_recomputed_region_drops_the_same():
    runs = []

    def block(logits):
        nudged = logits + 1e-6 * len(runs) * torch.arange(T).view(-1, 1) * torch.arange(E)
        runs.append(limit(route_top_k(nudged, top_k=2), capacity=3))
        return runs[-1].weights.square().sum()

    recompute(block, torch.zeros(T, E, requires_grad=True)).backward()
    assert len(runs) == 2 and torch.equal(runs[0].indices, runs[1].indices)


def test_wrong_options_are_refused():
    routing = route_top_k(torch.zeros(T, E), top_k=2)
    for refused, words in [
        (lambda: limit(routing, capacity=-1), "capacity=-1"),
        (lambda: limit(routing, capacity=1, drop="probs"), "drop='probs'"),  # pyright: ignore
        (lambda: Capacity(0.0), "factor=0.0"),
        (lambda: Capacity(1.0, drop="x"), "drop='x'"),  # pyright: ignore
        (lambda: capacity_of(1, top_k=1, num_experts=1, factor=float("inf")), "factor=inf"),
    ]:
        with pytest.raises(ValueError, match=words):
            refused()
