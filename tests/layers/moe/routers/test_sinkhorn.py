"""Sinkhorn's iteration scales rows and columns, over all ranks, and leaves evaluation alone."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers.moe import Capacity, SinkhornRouter, route_sinkhorn, sinkhorn
from megablocks_core.layers.moe.routing import NOWHERE
from megablocks_core.testing import ranks

T, H, E = 16, 6, 4


def test_rows_and_columns_have_their_sums():
    scaled = sinkhorn(3 * torch.randn(T, E).double(), iterations=500, tolerance=1e-12)
    assert_close(scaled.sum(1), torch.full((T,), 1 / T).double(), atol=1e-6, rtol=0)
    assert_close(scaled.sum(0), torch.full((E,), 1 / E).double(), atol=1e-6, rtol=0)


def test_iterations_end_where_columns_no_longer_move():
    logits = torch.randn(T, E)
    assert torch.equal(sinkhorn(logits, iterations=60), sinkhorn(logits, iterations=600))
    loose, one = (sinkhorn(logits, tolerance=9.0), sinkhorn(logits, iterations=1))
    assert torch.equal(loose, one)


def test_large_logits_do_not_overflow():
    assert sinkhorn(500 * torch.randn(T, E)).isfinite().all()


@pytest.mark.parametrize("top_k", [1, 2])
def test_training_balances_and_weights_are_those_of_the_logits(top_k):
    logits = (torch.randn(64, E) + torch.tensor([4.0, 0, 0, 0])).requires_grad_()
    routing, plain = (route_sinkhorn(logits, top_k=top_k, balance=b) for b in (True, False))
    assert routing.tokens_per_expert.max() < plain.tokens_per_expert.max()
    scores = logits.sigmoid() if top_k == 1 else logits.softmax(-1)
    assert_close(routing.weights, scores.gather(1, routing.indices))
    assert torch.equal(plain.indices, logits.topk(top_k).indices)
    slope = torch.randn_like(routing.weights)
    (routing.weights * slope).sum().backward()
    (grad,) = torch.autograd.grad((scores.gather(1, routing.indices) * slope).sum(), logits)
    assert_close(logits.grad, grad)


def test_a_router_balances_in_training_alone():
    router = SinkhornRouter(H, num_experts=E, top_k=2, capacity=Capacity(1.0))
    x = torch.randn(T, H)
    assert router(x).capacity == 8
    trained, evaluated = (router.train(mode)(x).indices for mode in (True, False))
    balanced = route_sinkhorn(router.logits(x), top_k=2)
    assert (trained == balanced.indices).logical_or(trained == NOWHERE).all()
    assert (evaluated == router.logits(x).topk(2).indices).logical_or(evaluated == NOWHERE).all()


@ranks(2)
def test_ranks_balance_as_one_does():
    tp = Mesh(tp=2).group("tp")
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(0)).double()
    mask = torch.arange(T) != 3
    own = slice(0, 5) if dist.get_rank() == 0 else slice(5, T)
    whole = sinkhorn(logits, mask=mask, group=LOCAL)
    assert_close(sinkhorn(logits[own], mask=mask[own], group=tp), whole[own], atol=1e-14, rtol=0)
    kept = sinkhorn(logits[mask])
    assert_close(whole[mask], kept, atol=1e-14, rtol=0)
    assert not whole[3].any()


def test_no_token_is_no_trouble():
    routing = SinkhornRouter(H, num_experts=E, top_k=2)(torch.empty(0, H))
    assert routing.tokens_per_expert.tolist() == [0] * E


def test_wrong_options_are_refused():
    for refused, words in [
        (lambda: sinkhorn(torch.zeros(2, 2), iterations=0), "iterations=0"),
        (lambda: route_sinkhorn(torch.zeros(2, 2), top_k=3), "top_k=3"),
        (lambda: SinkhornRouter(H, num_experts=2, top_k=3), "top_k=3"),
        (lambda: SinkhornRouter(H, num_experts=2, top_k=1, iterations=0), "iterations=0"),
        (lambda: route_sinkhorn(torch.zeros(2), top_k=1), r"must be \[T E\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            refused()
