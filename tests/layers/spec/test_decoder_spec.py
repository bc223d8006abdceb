"""Specs are read from configs without losing a feature, and written so that they read alike."""

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megablocks_core.layers import DecoderSpec, MoESpec

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
    MixtralConfig(
        **SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=3, router_aux_loss_coef=0.5
    ),
    Qwen3MoeConfig(
        **SIZES,
        head_dim=24,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    ),
    OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, clip_qkv=3.0, eos_token_id=1),
    Qwen2MoeConfig(
        **SIZES, num_experts=8, moe_intermediate_size=20, shared_expert_intermediate_size=24
    ),
    Glm4MoeConfig(
        **SIZES,
        n_routed_experts=8,
        moe_intermediate_size=20,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        norm_topk_prob=False,
        use_qk_norm=True,
        attention_bias=True,
        num_nextn_predict_layers=0,
        partial_rotary_factor=0.25,
    ),
    Qwen2MoeConfig(
        **SIZES,
        num_experts=8,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
        qkv_bias=False,
    ),
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
    assert DecoderSpec.from_hf(CONFIGS[-1]).attention_bias is False
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
    ("family", "heads"),
    [
        *(
            (family, {})
            for family in ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "glm4_moe")
        ),
        # transformers needs the number in the others.
        *((family, {"num_key_value_heads": None}) for family in ("llama", "qwen2", "qwen3")),
    ],
)
def test_f_176_absent_and_null_entries_mean_what_transformers_takes_them_for(family, heads):
    given = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 40, **heads}
    given |= {"num_hidden_layers": 2, "num_attention_heads": 32, "sliding_window": None}
    theirs = DecoderSpec.from_hf(AutoConfig.for_model(family, **given))
    ours = DecoderSpec.from_hf({**given, "model_type": family})
    assert ours == replace(theirs, extra=ours.extra)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"model_type": "llama", "hidden_size": 8}, "must have 'vocab_size'"),
        ({"hidden_dropout": 0.1}, "hidden_dropout"),
        ({"attention_dropout": 1.5}, "attention_dropout=1.5 must lie between 0 and 1"),
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
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1},
            "use_sliding_window",
        ),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"model_type": "mixtral", "sliding_window": 64}, "sliding_window"),
        ({"model_type": "mixtral", "num_local_experts": 1}, "top_k=2 must not be above"),
        ({"model_type": "olmoe"}, "must have 'num_experts'"),
        ({"model_type": "qwen2_moe", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 0}, "shared_ffn_size=0"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen3", "clip_qkv": 2.0}, "clip_qkv"),
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
        {"clip_qkv": 2.0},
        {"moe": MoESpec(4, 2, 48)},
    ],
    ids=lambda fields: str(fields),
)
def test_features_that_a_family_cannot_name_are_not_written(fields):
    spec = DecoderSpec(97, 32, 48, 2, 4, 2, 8, **fields)
    with pytest.raises(ValueError, match=next(iter(fields))):
        spec.to_hf()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True has no place"),
        ({"qk_norm": "projection"}, "qk_norm='projection' has no place"),
        ({"mlp_bias": True}, "mlp_bias=True has no place"),
        ({"moe": MoESpec(8, 2, 8)}, "moe.score='softmax' must be 'sigmoid'"),
        ({"dense_layers": (1,)}, r"moe.dense_layers=\(1,\) must be the first ones"),
        ({"shared_ffn_size": 12}, "moe.shared_ffn_size=12 must be some times moe.ffn_size=8"),
        ({"shared_gate": True, "shared_ffn_size": 8}, "moe.shared_gate=True must be False"),
    ],
)
def test_features_that_glm_cannot_name_are_not_written(fields, message):
    of_experts = {name: fields[name] for name in fields if name in MoESpec.__dataclass_fields__}
    moe = MoESpec(8, 2, 8, score="sigmoid", selection_bias=True, **of_experts)
    own = {name: value for name, value in fields.items() if name not in of_experts}
    spec = DecoderSpec(97, 32, 48, 2, 4, 2, 8, family="glm4_moe", **{"moe": moe, **own})
    with pytest.raises(ValueError, match=message):
        spec.to_hf()


def test_any_share_of_a_head_that_glm_turns_comes_back():
    """Transformers multiplies and rounds down, which 2/98 of 98 would not survive."""
    moe = MoESpec(8, 2, 8, score="sigmoid", selection_bias=True)
    for head in range(2, 130, 2):
        for width in range(2, head, 2):
            spec = DecoderSpec(
                97, 32, 48, 2, 4, 2, head, family="glm4_moe", moe=moe, rotary_dim=width
            )
            config = spec.to_hf()
            assert DecoderSpec.from_hf(config).rotary_dim == width
    whole = replace(spec, rotary_dim=None)
    assert DecoderSpec.from_hf(whole.to_hf()) == whole


def test_glm_without_layers_that_predict_later_tokens():
    """Its config says how many there are; a Decoder has none, and writes that it has none."""
    spec = DecoderSpec.from_hf(Glm4MoeConfig(**SIZES, num_nextn_predict_layers=1))
    assert spec.to_hf()["num_nextn_predict_layers"] == 0


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


def test_every_field_of_experts_comes_from_the_config():
    mixtral, qwen3_moe, olmoe, qwen2_moe, glm4_moe = map(DecoderSpec.from_hf, CONFIGS[5:10])
    assert mixtral.moe == MoESpec(4, 3, 48)
    assert mixtral.extra["router_aux_loss_coef"] == 0.5 and mixtral.rope_base == 1e6
    assert qwen3_moe.moe == MoESpec(8, 3, 20, sparse_step=2, dense_layers=(1,))
    assert olmoe.moe == MoESpec(4, 2, 48, renormalize=False)
    assert (olmoe.qk_norm, olmoe.clip_qkv) == ("projection", 3.0)
    shared = {"shared_ffn_size": 24, "shared_gate": True}
    assert qwen2_moe.moe == MoESpec(8, 4, 20, renormalize=False, **shared)
    assert qwen2_moe.attention_bias == "qkv"
    assert glm4_moe.moe == MoESpec(
        8,
        3,
        20,
        score="sigmoid",
        renormalize=False,
        dense_layers=(0,),
        shared_ffn_size=40,
        scale=2.5,
        selection_bias=True,
        num_groups=4,
        top_k_groups=2,
    )
    assert (glm4_moe.attention_bias, glm4_moe.qk_norm, glm4_moe.rotary_dim) == ("qkv", True, 2)


def test_entries_of_experts_that_are_absent_mean_what_they_mean_in_transformers():
    for family, entries in (
        ("mixtral", {}),
        ("qwen2_moe", {"num_attention_heads": 16}),
        ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 20, "num_experts_per_tok": 2}),
        ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 1}),
        ("glm4_moe", {}),
    ):
        sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
        sizes |= {"num_attention_heads": 8, "hidden_size": 64, **entries}
        absent = DecoderSpec.from_hf({"model_type": family, **sizes})
        whole = DecoderSpec.from_hf(AutoConfig.for_model(family, **sizes))
        assert absent == replace(whole, extra=absent.extra)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "mixtral"}, "moe=None must be a MoESpec in family 'mixtral'"),
        ({"clip_qkv": -1.0}, "clip_qkv=-1.0"),
        ({"moe": MoESpec(4, 2, 8), "activation_dropout": 0.1}, "activation_dropout must be 0"),
    ],
)
def test_fields_that_do_not_fit_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        DecoderSpec(97, 32, 48, 2, 4, 2, 8, **fields)
