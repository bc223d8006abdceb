"""Configs of models with state-space blocks are read without losing a feature, and written back."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from megablocks_core.layers import DecoderSpec, Mamba2Spec

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "initializer_range": 0.05}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "num_hidden_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": {"num_hidden_layers": 3, "state_size": 4, "expand": 3, "time_step_rank": 5},
    "mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "time_step_limit": [0.01, 0.5],
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        **HEADS,
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "intermediate_size": 40,
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "bamba": {
        **HEADS,
        **MAMBA2,
        "intermediate_size": 40,
        "attn_layer_indices": [1],
        "attention_bias": True,
    },
    "granitemoehybrid": {
        **HEADS,
        **MAMBA2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "position_embedding_type": "rope",
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 6,
    },
}
PATTERNS = {
    "mamba": "MMM",
    "mamba2": "MM",
    "nemotron_h": "M*-E",
    "bamba": "M-*-",
    "granitemoehybrid": "M-*-",
}


def _config(family: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **{**SIZES, **CONFIGS[family], **changes})


@pytest.mark.parametrize("family", CONFIGS)
def test_to_hf_reads_alike_here_and_in_transformers(family, tmp_path):
    config = _config(family)
    spec = DecoderSpec.from_hf(config)
    written = spec.to_hf()
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = AutoConfig.from_pretrained(tmp_path)
    assert DecoderSpec.from_hf(tmp_path) == DecoderSpec.from_hf(written) == spec
    ours, theirs = again.to_dict(), config.to_dict()
    differing = {key for key in theirs if ours.get(key) != theirs[key]}
    # What transformers does not read says here what it does.
    stated = {"time_step_limit"} if family == "nemotron_h" else set()
    assert differing == {"architectures", "_name_or_path", *stated}


def test_step_sizes_of_nemotron_are_limited_by_the_entry_that_transformers_reads():
    """It clamps by ``time_step_min``, and leaves ``time_step_limit`` aside."""
    changes = {"time_step_min": 0.02, "time_step_limit": [0.5, 1.0]}
    spec = DecoderSpec.from_hf({**_config("nemotron_h").to_dict(), **changes})
    assert isinstance(spec.mamba, Mamba2Spec)
    assert spec.mamba.time_step_limit == (0.02, math.inf)
    assert spec.to_hf()["time_step_min"] == 0.02
    with pytest.raises(ValueError, match="^mamba="):
        replace(spec, mamba=replace(spec.mamba, time_step_limit=(0.02, 1.0))).to_hf()


@pytest.mark.parametrize("family", CONFIGS)
def test_the_pattern_is_that_of_the_blocks(family):
    spec = DecoderSpec.from_hf(_config(family))
    assert spec.pattern == PATTERNS[family]
    assert spec.num_layers == len(spec.pattern)


@pytest.mark.parametrize("family", CONFIGS)
def test_what_transformers_saves_is_read(family, tmp_path):
    """With infinity in its own words."""
    config = _config(family)
    config.save_pretrained(tmp_path)
    assert DecoderSpec.from_hf(tmp_path) == DecoderSpec.from_hf(config)


def test_experts_of_granite_stand_in_every_layer():
    spec = DecoderSpec.from_hf(_config("granitemoehybrid", num_local_experts=4))
    assert spec.pattern == "ME*E"
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.shared_ffn_size) == (4, 40)
    assert DecoderSpec.from_hf(spec.to_hf()) == spec


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("mamba", {"hidden_act": "relu"}, "hidden_act"),
        ("mamba", {"use_mystery": True}, "use_mystery"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size"),
        ("nemotron_h", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("bamba", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type"),
    ],
)
def test_what_a_decoder_does_not_have_is_named(family, changes, name):
    config = {**_config(family).to_dict(), **changes}
    with pytest.raises(ValueError, match=name):
        DecoderSpec.from_hf(config)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("mamba", "pattern", "M*M"),
        ("bamba", "residual_scale", 0.5),
        ("bamba", "rotary_dim", 2),
        ("mamba2", "float32_residual", False),
        ("nemotron_h", "rope", True),
        ("nemotron_h", "tied", True),
        ("nemotron_h", "hidden_dropout", 0.5),
        ("granitemoehybrid", "gated_mlp", False),
    ],
)
def test_what_a_config_cannot_name_raises(family, name, value):
    spec = DecoderSpec.from_hf(_config(family))
    if name == "float32_residual":
        assert replace(spec, float32_residual=value).to_hf()["residual_in_fp32"] is False
        return
    changes = {name: value}
    if name == "pattern":
        changes |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    with pytest.raises(ValueError, match=f"^{name}="):
        replace(spec, **changes).to_hf()
