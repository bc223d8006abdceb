"""Routers follow Megatron-LM's functions: scores, groups, bias, Sinkhorn, quantiles, drops."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe import (
    GroupLimit,
    limit,
    route_quantile,
    route_sinkhorn,
    route_top_k,
    sinkhorn,
    update_quantile_bias,
)

T, E, K = 64, 16, 4


@pytest.fixture(scope="module")
def theirs() -> Any:
    name = "megatron.core.transformer.moe.moe_utils"
    pytest.importorskip(name, reason="oracle megatron")
    return import_module(name)


def dense(routing):
    """Weights and choices as [T E]."""
    chosen = routing.indices.clamp(min=0)
    weights = torch.zeros(T, E).scatter_add(1, chosen, routing.weights)
    return weights, torch.zeros(T, E).scatter_add(1, chosen, (routing.indices >= 0).float()) > 0


# Scores, whether they come before the choice, the limit, whether a bias shifts the choice. (With
# softmax after the choice the reference ranks groups by sums of logits; softmax takes no bias.)
LIMITS = [None, GroupLimit(4, 2, best=2), GroupLimit(8, 4, best=1)]
CASES = [
    *[("softmax", True, groups, False) for groups in LIMITS],
    ("softmax", False, None, False),
    *[
        (score, False, groups, bias)
        for score in ("sigmoid", "sqrtsoftplus")
        for groups in LIMITS
        for bias in (False, True)
    ],
]


@pytest.mark.parametrize("score, pre_softmax, groups, bias", CASES)
def test_scores_groups_and_bias(theirs, score, pre_softmax, groups, bias):
    logits = torch.randn(T, E)
    shift = 0.2 * torch.randn(E) if bias else None
    renormalize = not (score == "softmax" and pre_softmax)
    routing = route_top_k(
        logits,
        top_k=K,
        score=score,
        renormalize=renormalize,
        scale=2.5,
        groups=groups,
        selection_bias=shift,
    )
    expected = theirs.topk_routing_with_score_function(
        logits,
        K,
        use_pre_softmax=pre_softmax,
        num_groups=groups and groups.num_groups,
        group_topk=groups and groups.top_k_groups,
        scaling_factor=2.5,
        score_function=score,
        expert_bias=shift,
    )
    for ours, reference in zip(dense(routing), expected, strict=True):
        assert_close(ours, reference)
    _, scores = theirs.compute_routing_scores_for_aux_loss(logits, K, score)
    assert_close(routing.scores, scores)


@pytest.mark.parametrize("top_k", [1, 2])
def test_sinkhorn(theirs, top_k):
    logits = 2 * torch.randn(T, E)
    balanced = theirs.sinkhorn(logits)
    assert_close(sinkhorn(logits, iterations=500), balanced, rtol=1e-4, atol=1e-8)
    assert torch.equal(route_sinkhorn(logits, top_k=top_k).indices, balanced.topk(top_k).indices)


def test_quantile_balance(theirs):
    logits, bias = torch.randn(T, E), 0.3 * torch.randn(E)
    indices, quantile = theirs.qb_dual_update(logits, K, bias)
    assert torch.equal(route_quantile(logits, bias, top_k=K).indices, indices)
    assert_close(update_quantile_bias(bias, logits, top_k=K), quantile)


@pytest.mark.parametrize("policy", ["weight", "position"])
def test_drops(theirs, policy):
    whole = route_top_k(torch.randn(T, E), top_k=K, renormalize=False)
    name = "probs" if policy == "weight" else policy
    weights, chosen = theirs.apply_router_token_dropping(*dense(whole), K, 0.5, drop_policy=name)
    ours, kept = dense(limit(whole, capacity=8, drop=policy))
    if policy == "weight":
        assert torch.equal(kept, chosen)
        assert_close(ours, weights)
    else:  # which of equal places the reference keeps is left open by torch.topk
        assert torch.equal(kept.sum(0), chosen.sum(0))
