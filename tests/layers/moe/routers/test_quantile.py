"""The quantile bias evens the load of the batch that it was made of."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.moe import (
    Capacity,
    QuantileRouter,
    route_quantile,
    route_top_k,
    update_quantile_bias,
)
from megablocks_core.testing import ranks

T, H, E, K = 64, 6, 8, 2


def naive(bias, logits, top_k):
    """Expert by expert."""
    rows = [row - sorted((row - bias).tolist())[-top_k - 1] for row in logits]
    place = len(logits) * top_k // E
    columns = [sorted(row[e].item() for row in rows) for e in range(E)]
    return torch.tensor([column[-place - 1] for column in columns], dtype=torch.float64)


def test_the_quantile_is_that_of_a_loop():
    logits, bias = torch.randn(T + 3, E).double(), torch.randn(E).double()
    quantile = naive(bias, logits, K)
    assert_close(update_quantile_bias(bias, logits, top_k=K), quantile, atol=1e-12, rtol=0)
    blended = update_quantile_bias(bias, logits, top_k=K, ema=0.75)
    assert_close(blended, 0.75 * bias + 0.25 * quantile, atol=1e-12, rtol=0)


def test_load_becomes_even():
    router = QuantileRouter(H, num_experts=E, top_k=K)
    x = torch.randn(4096, H)
    first = router(x)
    for _ in range(8):
        routing = router(x)
        router.qb_beta.copy_(update_quantile_bias(router.qb_beta, routing.logits, top_k=K))
    before, after = first.tokens_per_expert.double().std(), router(x).tokens_per_expert.double()
    assert after.std() < 0.1 * before
    assert after.sum() == 4096 * K


def test_choices_see_the_bias_and_weights_do_not():
    logits = torch.randn(T, E)
    bias = torch.linspace(-2, 2, E)
    routing = route_quantile(logits, bias, top_k=K, score="sigmoid", renormalize=2.0, scale=3.0)
    choices = (logits - bias).topk(K).indices
    assert torch.equal(routing.indices, choices)
    expected = route_top_k(
        logits, top_k=K, score="sigmoid", renormalize=2.0, scale=3.0, choices=choices
    )
    assert_close(routing.weights, expected.weights)


@ranks(2)
def test_ranks_find_the_quantile_of_one():
    group = Mesh(dp=2).group("dp")
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(0))
    bias, mask = torch.linspace(-1, 1, E), torch.arange(T) % 7 > 0
    own = slice(0, 9) if dist.get_rank() == 0 else slice(9, T)
    whole = update_quantile_bias(bias, logits[mask], top_k=K)
    part = update_quantile_bias(bias, logits[own], top_k=K, mask=mask[own], group=group)
    assert torch.equal(part, whole)


def test_without_a_token_the_bias_stays():
    bias = torch.linspace(-1, 1, E)
    out = torch.zeros(3, dtype=torch.bool)
    assert torch.equal(update_quantile_bias(bias, torch.empty(0, E), top_k=K), bias)
    assert torch.equal(update_quantile_bias(bias, torch.randn(3, E), top_k=K, mask=out), bias)


def test_a_router_limits_what_it_routes():
    router = QuantileRouter(H, num_experts=E, top_k=K, capacity=Capacity(1.0))
    assert router(torch.randn(T, H)).capacity == T * K // E


def test_wrong_options_are_refused():
    bias, logits = torch.zeros(E), torch.zeros(T, E)
    for refused, words in [
        (lambda: update_quantile_bias(bias, logits, top_k=E), "top_k=8 must be from 1 to 7"),
        (lambda: update_quantile_bias(bias, logits, top_k=K, ema=1.0), "ema=1.0"),
        (lambda: update_quantile_bias(bias[1:], logits, top_k=K), "bias of shape"),
        (lambda: route_quantile(logits, bias[1:], top_k=K), "bias of shape"),
        (lambda: route_quantile(logits, bias, top_k=0), "top_k=0"),
        (lambda: QuantileRouter(H, num_experts=E, top_k=9), "top_k=9"),
    ]:
        with pytest.raises(ValueError, match=words):
            refused()
