"""Jitter is a function of words: the same in any cut, and when a region runs again."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe import Jitter, TopKRouter
from megablocks_core.parallel import DropoutKey, recompute

T, H = 400, 30
INDEX = DropoutKey(3, 7).index(torch.arange(4).view(-1, 1), torch.arange(100)).view(-1)


def test_factors_are_uniform_and_of_their_stream():
    factors = Jitter(0.25, stream="a")(torch.ones(T, H).double(), index=INDEX)
    assert 0.75 <= factors.min() < 0.751 and 1.249 < factors.max() < 1.25
    assert_close(factors.mean(), torch.tensor(1.0).double(), atol=5e-3, rtol=0)
    assert_close(factors.std(), torch.tensor(0.5 / 12**0.5).double(), atol=3e-3, rtol=0)
    other = Jitter(0.25, stream="b")(torch.ones(T, H).double(), index=INDEX)
    assert abs(torch.corrcoef(torch.stack([factors.flatten(), other.flatten()]))[0, 1]) < 0.03
    assert factors[0].unique().numel() == H and factors[:, 0].unique().numel() == T


def test_any_part_of_the_tokens_has_its_own_factors():
    jitter = Jitter(0.1, stream="a")
    x = torch.randn(T, H)
    whole = jitter(x, index=INDEX)
    assert torch.equal(jitter(x[130:170], index=INDEX[130:170]), whole[130:170])


def test_gradients_are_those_of_the_factors():
    jitter = Jitter(0.1, stream="a")
    x = torch.randn(T, H).double().requires_grad_()
    factors = jitter(torch.ones(T, H).double(), index=INDEX)
    slope = torch.randn(T, H).double()
    (jitter(x, index=INDEX) * slope).sum().backward()
    assert_close(x.grad, slope * factors, atol=1e-12, rtol=0)


def test_a_router_jitters_in_training_alone_and_alike_when_recomputed():
    router = TopKRouter(H, num_experts=4, top_k=2, jitter=Jitter(0.3, stream="a"))
    x = torch.randn(T, H, requires_grad=True)
    runs = []

    def block(x):
        runs.append(router(x, index=INDEX))
        return runs[-1].weights.square().sum()

    recompute(block, x).backward()
    assert torch.equal(runs[0].logits, runs[1].logits)
    plain = x @ router.weight.T
    assert not torch.allclose(runs[0].logits, plain, atol=1e-3)
    assert_close(router.eval()(x).logits, plain)


def test_wrong_options_are_refused():
    for eps in (-0.1, 1.1, "1"):
        with pytest.raises(ValueError, match=f"eps={eps!r} must be from 0 to 1"):
            Jitter(eps, stream="a")  # pyright: ignore
    with pytest.raises(ValueError, match="stream='' must name"):
        Jitter(0.1, stream="")
    with pytest.raises(ValueError, match="index=None must be"):
        Jitter(0.1, stream="a")(torch.ones(2, 3), index=None)
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(2)):
        with pytest.raises(ValueError, match=r"must be int64 of \[2\]"):
            Jitter(0.1, stream="a")(torch.ones(2, 3), index=wrong)
