"""Specs are read from configs without losing a feature, and written so that they read alike."""

import json
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from megablocks_core.layers import DecoderSpec

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = [
    LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, pad_token_id=3, eos_token_id=[1, 2]),
    LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters={**LLAMA3, "rope_theta": 5e5}),
    MistralConfig(**SIZES, head_dim=16, sliding_window=None, rms_norm_eps=1e-5),
    Qwen2Config(**SIZES, initializer_range=0.1),
    Qwen3Config(**SIZES, head_dim=24, attention_bias=True, hidden_act="gelu"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_to_hf_reads_alike_here_and_in_transformers(config, tmp_path):
    spec = DecoderSpec.from_hf(config)
    assert DecoderSpec.from_hf(spec.to_hf()) == spec
    (tmp_path / "config.json").write_text(json.dumps(spec.to_hf()))
    assert DecoderSpec.from_hf(tmp_path) == spec
    assert DecoderSpec.from_hf(str(tmp_path / "config.json")) == spec
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    changed = {key for key, value in config.to_dict().items() if theirs[key] != value}
    assert changed <= {"architectures", "_name_or_path"}


def test_every_field_comes_from_the_config():
    spec = DecoderSpec.from_hf(CONFIGS[4])
    assert (spec.vocab_size, spec.hidden_size, spec.ffn_size, spec.num_layers) == (97, 32, 48, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 24)
    assert (spec.activation, spec.attention_bias, spec.qk_norm) == ("gelu", True, True)
    assert DecoderSpec.from_hf(CONFIGS[3]).attention_bias == "qkv"
    llama = DecoderSpec.from_hf(CONFIGS[1])
    assert llama.tied and llama.rope_base == 5e5 and llama.rope_scaling == LLAMA3


def test_older_names_of_the_rotary_entries_are_read():
    scaling = {"type": "linear", "factor": 2.0}
    spec = DecoderSpec.from_hf(_llama(rope_theta=7.0, rope_scaling=scaling))
    assert spec.rope_base == 7.0
    assert spec.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    yarn = {"rope_type": "yarn", "factor": 2.0}
    spec = DecoderSpec.from_hf(_llama(rope_scaling=yarn, max_position_embeddings=128))
    assert spec.rope_scaling == {**yarn, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"model_type": "llama", "hidden_size": 8}, "must have 'vocab_size'"),
        ({"hidden_dropout": 0.1}, "hidden_dropout"),
        ({"attention_dropout": 1.5}, "attention_dropout=1.5 must lie between 0 and 1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"num_experts": 8}, "num_experts"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"hidden_act": "xielu"}, "activation='xielu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "mrope_section"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"num_hidden_layers": 0}, "num_layers=0"),
        ({"pad_token_id": 97}, "pad_token_id=97"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window=64"),
        ({"model_type": "mistral"}, "sliding_window=None"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types",
        ),
    ],
)
def test_what_a_decoder_does_not_have_raises_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        DecoderSpec.from_hf(config if "hidden_size" in config else _llama(**config))


def test_entries_that_are_off_are_accepted():
    DecoderSpec.from_hf(_llama(attention_dropout=0.0, num_experts=None, use_cache=True))


@pytest.mark.parametrize(
    "fields",
    [
        {"qk_norm": True},
        {"attention_bias": "qkv"},
        {"hidden_dropout": 0.1},
        {"activation_dropout": 0.1},
    ],
    ids=lambda fields: str(fields),
)
def test_features_that_a_family_cannot_name_are_not_written(fields):
    spec = DecoderSpec(97, 32, 48, 2, 4, 2, 8, **fields)
    with pytest.raises(ValueError, match=next(iter(fields))):
        spec.to_hf()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_attention_dropout_is_that_of_the_config(family):
    config = {**_llama(attention_dropout=0.25), "model_type": family, "sliding_window": None}
    spec = DecoderSpec.from_hf(config)
    assert spec.attention_dropout == 0.25
    assert DecoderSpec.from_hf(spec.to_hf()) == spec
    assert AutoConfig.for_model(**spec.to_hf()).attention_dropout == 0.25


def test_unknown_families_raise():
    with pytest.raises(ValueError, match="family='gpt'"):
        DecoderSpec(97, 32, 48, 2, 4, 2, 8, family="gpt")


def _llama(**entries):
    return {"model_type": "llama", **SIZES, **entries}
