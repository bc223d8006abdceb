"""What is particular to configs of Nemotron-H, Bamba and Granite 4."""

import math
from dataclasses import replace

import pytest

from megablocks_core.layers import DecoderSpec, Mamba2Spec
from tests.layers.spec.hybrid_configs import config_of


def test_step_sizes_of_nemotron_are_limited_by_the_entry_that_transformers_reads():
    """It clamps by ``time_step_min``, and leaves ``time_step_limit`` aside."""
    changes = {"time_step_min": 0.02, "time_step_limit": [0.5, 1.0]}
    spec = DecoderSpec.from_hf({**config_of("nemotron_h").to_dict(), **changes})
    assert isinstance(spec.mamba, Mamba2Spec)
    assert spec.mamba.time_step_limit == (0.02, math.inf)
    assert spec.to_hf()["time_step_min"] == 0.02
    with pytest.raises(ValueError, match="^mamba="):
        replace(spec, mamba=replace(spec.mamba, time_step_limit=(0.02, 1.0))).to_hf()


def test_experts_of_granite_stand_in_every_layer():
    spec = DecoderSpec.from_hf(config_of("granitemoehybrid", num_local_experts=4))
    assert spec.pattern == "ME*E"
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.shared_ffn_size) == (4, 40)
    assert DecoderSpec.from_hf(spec.to_hf()) == spec


def test_absent_sizes_of_heads_follow_from_others():
    config = config_of("granitemoehybrid").to_dict()
    for key in ("mamba_d_head", "num_key_value_heads"):
        del config[key]
    spec = DecoderSpec.from_hf(config)
    assert isinstance(spec.mamba, Mamba2Spec)
    assert (spec.mamba.head_dim, spec.num_kv_heads, spec.head_dim) == (8, 4, 8)


def test_heads_must_fill_the_width_that_the_config_says():
    with pytest.raises(ValueError, match="^mamba_expand=3 times hidden_size=32 must be"):
        DecoderSpec.from_hf({**config_of("bamba").to_dict(), "mamba_expand": 3})
