"""Choices that no weight makes are different experts, and functions of words or places."""

import pytest
import torch

from megablocks_core.layers.moe import (
    BalancedRouter,
    HashRouter,
    TopKRouter,
    balanced_choices,
    random_choices,
)
from megablocks_core.layers.moe.routing import NOWHERE
from megablocks_core.parallel import DropoutKey

T, H, E = 4000, 4, 8
WORDS = DropoutKey(1, 2).index(torch.zeros(1, dtype=torch.int64), torch.arange(T))


def test_random_choices_are_uniform_different_and_of_their_words():
    choices = random_choices(WORDS, num_experts=E, top_k=3, stream="a")
    assert (choices.sort(dim=-1).values.diff() > 0).all()
    counts = choices.flatten().bincount(minlength=E)
    assert (counts - T * 3 / E).abs().max() < 5 * (T * 3 / E) ** 0.5
    part = random_choices(WORDS[70:90], num_experts=E, top_k=3, stream="a")
    assert torch.equal(part, choices[70:90])
    other = random_choices(WORDS, num_experts=E, top_k=3, stream="b")
    assert abs((other == choices).double().mean() - 1 / E) < 0.02


@pytest.mark.parametrize("top_k", [1, 3, E])
def test_balanced_choices_are_even_and_different(top_k):
    choices = balanced_choices(16, num_experts=E, top_k=top_k)
    assert choices.flatten().bincount(minlength=E).tolist() == [2 * top_k] * E
    assert all(len(set(row)) == top_k for row in choices.tolist())


def test_forced_choices_keep_the_weights_of_a_router():
    router = TopKRouter(H, num_experts=E, top_k=2)
    routing = router(torch.randn(16, H), choices=balanced_choices(16, num_experts=E, top_k=2))
    assert routing.tokens_per_expert.tolist() == [4] * E
    routing.weights.square().sum().backward()
    assert router.weight.grad is not None and router.weight.grad.any()


def test_equal_tokens_go_to_equal_experts():
    router = HashRouter(num_experts=E, top_k=2, stream="layers.0")
    ids = torch.randint(50, (T,))
    routing = router(torch.randn(T, H), index=ids)
    for token in range(50):
        assert len(routing.indices[ids == token].unique(dim=0)) == 1
    assert (routing.weights == 0.5).all() and (routing.scores == 1 / E).all()
    elsewhere = HashRouter(num_experts=E, top_k=2, stream="layers.1")
    assert not torch.equal(elsewhere(torch.randn(T, H), index=ids).indices, routing.indices)


def test_masked_tokens_go_nowhere():
    mask = torch.arange(16) > 3
    for routing in (
        HashRouter(num_experts=E, top_k=2, stream="a")(
            torch.ones(16, H), index=WORDS[:16], mask=mask
        ),
        BalancedRouter(num_experts=E, top_k=2)(torch.ones(16, H), mask=mask),
    ):
        assert (routing.indices[:4] == NOWHERE).all() and routing.tokens_per_expert.sum() == 24
        assert not routing.weights[:4].any() and not routing.scores[:4].any()


def test_no_token_is_no_trouble():
    assert BalancedRouter(num_experts=E, top_k=2)(torch.ones(0, H)).indices.shape == (0, 2)


def test_wrong_options_are_refused():
    hashed = HashRouter(num_experts=E, top_k=2, stream="a")
    for refused, words in [
        (lambda: HashRouter(num_experts=E, top_k=9, stream="a"), "top_k=9"),
        (lambda: HashRouter(num_experts=E, top_k=2, stream=""), "stream=''"),
        (lambda: BalancedRouter(num_experts=E, top_k=0), "top_k=0"),
        (lambda: balanced_choices(3, num_experts=E, top_k=9), "top_k=9"),
        (lambda: random_choices(WORDS, num_experts=E, top_k=9, stream="a"), "top_k=9"),
        (lambda: random_choices(WORDS, num_experts=E, top_k=2, stream=""), "stream=''"),
        (lambda: random_choices(WORDS.float(), num_experts=E, top_k=2, stream="a"), "int64"),
        (lambda: hashed(torch.ones(2, H)), "index=None"),
        (lambda: hashed(torch.ones(2, H), index=WORDS[:3]), r"int64 of \[2\]"),
        (
            lambda: BalancedRouter(num_experts=E, top_k=2)(torch.ones(2, H), mask=torch.ones(2)),
            "True for a token that counts",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            refused()
