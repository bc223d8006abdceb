"""Factors are what numbers are times, and are shared as TensorRT-LLM multiplies."""

import pytest
import torch

from megablocks_core.export.lazies import lazy
from megablocks_core.export.trtllm.scales import Scales

WEIGHT = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
AMAX = {"a": 2.0, "b": 7.0, "c": 5.0}


def made(pieces):
    found = {piece.name: piece.value[...] for piece in pieces}
    for piece in pieces:
        assert found[piece.name].dtype == piece.dtype
    return found


def test_a_linear_layer():
    scales = Scales({"a", "b"}, AMAX, {"a": 3.0, "b": 1.0})
    found = made(scales.linear("x", ["a", "b"], lazy(WEIGHT, "BF16"), torch.bfloat16))
    factor = torch.tensor([7.0]) / 448
    assert torch.equal(found["x.weights_scaling_factor"], factor)
    assert torch.equal(found["x.activation_scaling_factor"], torch.tensor([3.0]) / 448)
    assert torch.equal(
        found["x.weight"].float(), (WEIGHT.float() / factor).to(torch.float8_e4m3fn).float()
    )
    plain = made(scales.linear("x", ["c"], lazy(WEIGHT, "BF16"), torch.bfloat16))
    assert list(plain) == ["x.weight"] and torch.equal(plain["x.weight"], WEIGHT)


def test_experts_have_a_factor_each_and_one_for_what_comes_in():
    scales = Scales(set(AMAX), AMAX, {"a": 3.0, "b": 1.0, "c": 9.0})
    sources = [("a",), ("b",), ("c",)]
    weights = {1: lazy(WEIGHT, "BF16"), 2: lazy(-WEIGHT, "BF16")}
    found = made(scales.experts("x", sources, weights, torch.bfloat16))
    factors = torch.tensor([[7.0], [5.0]]) / 448
    assert torch.equal(found["x.weights_scaling_factor"], factors)
    assert torch.equal(found["x.activation_scaling_factor"], torch.tensor([9.0]) / 448)
    values = found["x.weight"].float() * factors[..., None]
    both = torch.stack([WEIGHT, -WEIGHT]).float()
    assert found["x.weight"].shape == (2, 4, 6)
    assert ((values - both).abs() <= both.abs() / 15 + factors.max() / 256).all()


def test_factors_of_the_cache_are_at_least_one():
    scales = Scales(keys={"k": 4.0}, values={"v": 896.0})
    found = {name: value.item() for name, value in made(scales.cache("x", "k", "v")).items()}
    assert found == {
        "x.k_cache_scaling_factor": 1.0,
        "x.v_cache_scaling_factor": 2.0,
        "x.kv_cache_scaling_factor": 2.0,
    }
    assert Scales().cache("x", "k", "v") == []


def test_weights_that_share_a_factor_are_taken_together():
    with pytest.raises(ValueError, match="recipe must take all of a, c, or none"):
        Scales({"a"}, AMAX, AMAX).linear("x", ["a", "c"], lazy(WEIGHT, "BF16"), torch.bfloat16)


def test_where_names_here_alone_are_known():
    scales = Scales(weights=AMAX, inputs=AMAX, excluded={"x"})
    weight = lazy(WEIGHT, "BF16")
    assert len(scales.linear("x", ["a"], weight, torch.bfloat16)) == 1
    assert len(scales.linear("y", ["a"], weight, torch.bfloat16)) == 3
