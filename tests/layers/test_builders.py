"""Builders of common models: few arguments, a whole spec."""

import pytest
import torch

from megablocks_core.layers import Decoder, DecoderSpec, Mamba2Spec, gpt, hybrid, mamba

TOKENS = torch.arange(6)[None]


@pytest.mark.parametrize(
    "spec",
    [
        gpt(50, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2),
        mamba(50, hidden_size=32, num_layers=2, state_size=8, head_dim=16),
        hybrid(
            50,
            {"*": 0.25, "-": 0.5},
            num_layers=4,
            hidden_size=32,
            num_heads=4,
            ffn_size=48,
            mamba=Mamba2Spec(4, 8, 8),
        ),
        hybrid(50, "MM", hidden_size=32, mamba=Mamba2Spec(4, 8, 8)),
    ],
    ids=["gpt", "mamba", "shares", "pattern"],
)
def test_what_they_build_runs(spec):
    assert Decoder(spec)(TOKENS).logits.shape == (1, 6, 50)


def test_sizes_follow_from_few_numbers():
    spec = gpt(50, hidden_size=96, num_layers=2, num_heads=4)
    assert (spec.ffn_size, spec.num_kv_heads, spec.head_dim) == (256, 4, 24)
    spec = mamba(50, hidden_size=128, num_layers=3)
    assert (spec.pattern, spec.mamba) == ("MMM", Mamba2Spec(4, 64, 128))


def test_configs_say_what_they_build():
    for spec in (
        gpt(50, hidden_size=32, num_layers=2, num_heads=4),
        mamba(50, hidden_size=32, num_layers=2, state_size=8, head_dim=16),
        hybrid(50, "M-", hidden_size=32, ffn_size=48, mamba=Mamba2Spec(4, 8, 8)),
    ):
        assert DecoderSpec.from_hf(spec.to_hf()) == spec


def test_shares_need_a_number_of_blocks():
    with pytest.raises(ValueError, match="num_layers=None"):
        hybrid(50, {"*": 0.5}, hidden_size=32)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: gpt(50, hidden_size=32, num_layers=2, num_heads=0), "num_heads"),
        (lambda: gpt(50, hidden_size=32, num_layers=2, num_heads=3), "num_heads"),
        (lambda: gpt(50, hidden_size=32, num_layers=2.0, num_heads=4), "num_layers"),
        (lambda: mamba(50, hidden_size=32, num_layers=2, head_dim=0), "head_dim"),
        (lambda: mamba(50, hidden_size=32, num_layers=2, head_dim=24), "head_dim"),
        (lambda: mamba(50, hidden_size=32, num_layers="2"), "num_layers"),
        (lambda: hybrid(50, "M*", hidden_size=30, num_heads=4), "num_heads"),
        (lambda: hybrid(50, "M", hidden_size=32, mamba=3), "mamba"),
        (lambda: hybrid(50, 3, hidden_size=32, num_layers=2), "pattern"),
        (lambda: hybrid(50, ["M"], hidden_size=32), "pattern"),
        (lambda: hybrid("50", "M", hidden_size=32, mamba=Mamba2Spec(2, 4, 4)), "vocab_size"),
        (lambda: hybrid(50, "E", hidden_size=32, moe=Mamba2Spec(2, 4, 4)), "moe"),
        (lambda: hybrid(50, {"*": "a"}, hidden_size=32, num_layers=2), "ratios"),
        (lambda: hybrid(50, {"*": 0.5}, hidden_size=32, num_layers=True), "num_layers"),
    ],
)
def test_sizes_that_make_no_model_are_named(build, name):
    with pytest.raises(ValueError, match=f"^{name}="):
        build()
