"""Configs of Qwen3-Next and Qwen3.5 are read without losing a feature, and written back."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, PreTrainedConfig

from megablocks_core.layers import DecoderSpec
from megablocks_core.layers.spec.entries import Entries
from megablocks_core.layers.spec.gated_delta import read_layers, write_layers

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}


def _config(**changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model("qwen3_next", **{**SIZES, **changes})


@given(st.lists(st.tuples(st.sampled_from("G*"), st.sampled_from("-E")), min_size=1, max_size=9))
def test_layers_read_alike(pairs: list[tuple[str, str]]):
    pattern = "".join(mixer + second for mixer, second in pairs)
    assert read_layers(Entries({"num_experts": 4, **write_layers(pattern)})) == pattern


@pytest.mark.parametrize(
    ("entries", "pattern"),
    [
        ({}, "GEGEGE*E"),
        ({"full_attention_interval": 2}, "GE*EGE*E"),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, "G-GEG-*-"),
        ({"num_experts": 0}, "G-G-G-*-"),
        ({"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "*EGEGEGE"),
    ],
)
def test_layers_stand_where_transformers_has_them(entries, pattern):
    config = {"num_hidden_layers": 4, "num_experts": 8, **entries}
    assert read_layers(Entries(config)) == pattern


def test_the_interval_is_written_where_there_is_one():
    assert write_layers("GEGE*E")["full_attention_interval"] == 3
    assert write_layers("GEGE")["full_attention_interval"] == 3
    assert "full_attention_interval" not in write_layers("*EGE")


@pytest.mark.parametrize("pattern", ["GG", "G", "M-", "-E"])
def test_other_patterns_have_no_layers(pattern):
    with pytest.raises(ValueError, match="must be of pairs"):
        write_layers(pattern)


def test_unknown_layers_are_named():
    entries = Entries({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]})
    with pytest.raises(ValueError, match="sliding_attention"):
        read_layers(entries)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mlp_only_layers": [1], "attention_bias": True, "tie_word_embeddings": True},
        {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "norm_topk_prob": False},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "pad_token_id": 3},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ],
)
def test_to_hf_reads_alike_here_and_in_transformers(changes, tmp_path):
    config = _config(**changes)
    spec = DecoderSpec.from_hf(config)
    (tmp_path / "config.json").write_text(json.dumps(spec.to_hf()))
    again = AutoConfig.from_pretrained(tmp_path)
    assert DecoderSpec.from_hf(tmp_path) == DecoderSpec.from_hf(again) == spec
    theirs, ours = config.to_dict(), again.to_dict()
    unused = set() if "-" in (spec.pattern or "") else {"intermediate_size"}
    if "G" not in (spec.pattern or ""):
        unused |= {key for key in theirs if key.startswith("linear_")}
    differing = {key for key in theirs if ours.get(key) != theirs[key]}
    assert differing <= {"architectures", "_name_or_path", *unused}


@pytest.mark.parametrize(
    ("family", "second", "changes"),
    [
        ("qwen3_5_text", "-", {}),
        ("qwen3_5_text", "-", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3_5_moe_text", "E", {"num_experts": 8, "num_experts_per_tok": 3}),
    ],
)
def test_configs_of_qwen3_5_read_alike(family, second, changes, tmp_path):
    sizes = {key: value for key, value in SIZES.items() if "expert" not in key and "moe" not in key}
    rope = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"}
    of_images = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = AutoConfig.for_model(family, **sizes, **changes, rope_parameters={**rope, **of_images})
    spec = DecoderSpec.from_hf(config)
    assert spec.pattern == "".join(f"{mixer}{second}" for mixer in "GGG*")
    (tmp_path / "config.json").write_text(json.dumps(spec.to_hf()))
    again = AutoConfig.from_pretrained(tmp_path)
    assert DecoderSpec.from_hf(again) == spec
    theirs, ours = config.to_dict(), again.to_dict()
    differing = {key for key in theirs if ours.get(key) != theirs[key]}
    unused = {"intermediate_size"} if second == "E" else set()
    assert differing <= {"architectures", "_name_or_path", "rope_parameters", *unused}
    assert ours["rope_parameters"] == rope


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_5_text", {"num_experts": 8}, "num_experts=8 must be absent"),
        ("qwen3_5_text", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_5_moe_text", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 must be absent"),
    ],
)
def test_layers_of_qwen3_5_are_alike(family, changes, message):
    config = {"model_type": family, "vocab_size": 3, "hidden_size": 8, "num_hidden_layers": 4}
    with pytest.raises(ValueError, match=message):
        DecoderSpec.from_hf({**config, **changes})


@pytest.mark.parametrize("pattern", ["GEG-", "G-G-"])
def test_patterns_that_configs_of_qwen3_5_cannot_name_raise(pattern):
    spec = DecoderSpec.from_hf(_config(num_hidden_layers=2, mlp_only_layers=[1]))
    moe = spec.moe if "E" in pattern else None
    heads = {"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "rotary_dim": None}
    changes = {"pattern": pattern, "moe": moe, "family": "qwen3_5_moe_text", **heads}
    with pytest.raises(ValueError, match="in a config of 'qwen3_5_moe_text'"):
        replace(spec, **changes).to_hf()


def test_published_configs_are_read():
    """With the older entries of rotary embeddings, and without a list of layers."""
    published = {
        **{key: value for key, value in _config().to_dict().items() if key != "layer_types"},
        "rope_parameters": None,
        "rope_theta": 1e7,
        "rope_scaling": None,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "use_sliding_window": False,
    }
    spec = DecoderSpec.from_hf(published)
    assert (spec.pattern, spec.rotary_dim, spec.rope_base) == ("GEGEGE*E", 4, 1e7)
    assert spec.gated_attention and spec.zero_centered_norms and spec.qk_norm is True
    assert spec.moe is not None and spec.moe.shared_gate


@pytest.mark.parametrize(
    ("name", "value"),
    [("gated_attention", False), ("zero_centered_norms", False), ("activation", "gelu")],
)
def test_what_a_config_cannot_name_raises(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        replace(DecoderSpec.from_hf(_config()), **{name: value}).to_hf()


def test_another_activation_is_refused():
    with pytest.raises(ValueError, match="hidden_act='gelu' must be 'silu'"):
        DecoderSpec.from_hf(_config(hidden_act="gelu"))
