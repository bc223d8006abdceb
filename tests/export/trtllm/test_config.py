"""config.json says of a model what TensorRT-LLM asks, and its sizes come back from there."""

import pytest
import torch
import transformers

from megablocks_core.export.trtllm.config import ARCHITECTURES, config_of, in_hf_words
from megablocks_core.export.trtllm.mapping import Mapping
from megablocks_core.export.trtllm.model import SERVED, model_of
from megablocks_core.export.verifying import layout_of
from tests.export.trtllm.plain import FAMILIES

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(family, mapping=None, **more):
    words = {"model_type": family, **FAMILIES[family], **more}
    return config_of(model_of(words), mapping or Mapping(), torch.bfloat16, {})


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_f_180_linear_rope_scaling_is_there(kind):
    """Factor 4, in the words of transformers 4 (two of them) and 5."""
    wanted = {"type": kind, "rope_type": kind, "factor": 4.0}
    for given in (
        {"rope_scaling": {"type": kind, "factor": 4.0}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_type": kind, "factor": 4.0}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": kind, "factor": 4.0, "rope_theta": 5e5}},
    ):
        found = config("llama", **given)
        assert (found["rotary_scaling"], found["rotary_base"]) == (wanted, 5e5)
    plain = config("llama", rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert (plain["rotary_scaling"], plain["rotary_base"]) == (None, 7.0)


def test_f_180_llama3_scaling_is_there():
    found = config("llama", rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert found["rotary_scaling"] == {**LLAMA3, "type": "llama3"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_type='yarn' .* one of linear, dynamic"),
        ({"rope_type": "longrope", "factor": 4.0}, "rope_type='longrope'"),
        ({"rope_type": "llama3", "factor": 4.0}, r"must have \['low_freq_factor'"),
        ({"type": "linear"}, r"must have \['factor'\] for linear"),
    ],
)
def test_f_180_other_scalings_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        config("llama", rope_scaling=given)


def test_words_of_families():
    assert set(ARCHITECTURES.values()) == set(SERVED)
    found = config("qwen3_moe")
    assert found["moe"] == {"num_experts": 4, "top_k": 2, "normalization_mode": 1}
    assert (found["qwen_type"], found["qk_layernorm"], found["attn_bias"]) == (
        "qwen3_moe",
        True,
        False,
    )
    assert (found["moe_intermediate_size"], found["intermediate_size"]) == (8, 24)
    assert config("qwen3_moe", norm_topk_prob=False)["moe"]["normalization_mode"] == 0
    assert config("mixtral")["hidden_act"] == "swiglu" and config("mixtral")["rotary_base"] == 1e6
    assert config("qwen2")["attn_bias"] and config("llama")["mlp_bias"]
    found = config("gpt2")
    assert (found["position_embedding_type"], found["hidden_act"]) == ("learned_absolute", "gelu")
    assert found["max_position_embeddings"] == 10 and found["num_key_value_heads"] == 4
    found = config("mamba2", Mapping(2, 3))
    assert found["mamba_version"] == "Mamba2" and found["num_attention_heads"] == 6
    assert (found["rnn_hidden_size"], found["rnn_conv_dim_size"], found["ngroups"]) == (32, 80, 4)
    assert not found["use_parallel_embedding"]


def test_words_of_gemma():
    found = config("gemma")
    assert found["share_embedding_table"] and found["hidden_act"] == "gelu_pytorch_tanh"
    assert config("gemma", hidden_act="gelu") == found
    found = config("gemma2")
    assert (found["query_pre_attn_scalar"], found["final_logit_softcapping"]) == (256, 30.0)
    assert found["attn_logit_softcapping"] == 50.0
    words = transformers.Gemma3TextConfig(**FAMILIES["gemma3_text"]).to_dict()
    found = config_of(model_of(words), Mapping(), torch.float16, {})
    assert (found["rotary_base"], found["rope_local_base_freq"]) == (1e6, 1e4)
    assert found["_sliding_window_pattern"] == 6
    with pytest.raises(ValueError, match="layer_types must be full_attention every 6 layers"):
        config_of(
            model_of({**words, "layer_types": ["full_attention"] * 3}),
            Mapping(),
            torch.float16,
            {},
        )


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' .* must be one of silu"),
        ("gpt2", {"activation_function": "gelu"}, "activation_function='gelu'"),
        ("mamba2", {"use_conv_bias": False}, "use_conv_bias=False"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_act='silu'"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ],
)
def test_what_cannot_be_said_is_refused(family, more, message):
    with pytest.raises(ValueError, match=message):
        config(family, **more)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_sizes_come_back(family):
    """The files of Hugging Face that a checkpoint's config stands for are those of the model."""
    options = FAMILIES[family]
    words = {"model_type": family, **options}
    again = in_hf_words(config(family, Mapping(2)))
    ours, theirs = layout_of(again).schema, layout_of(words).schema
    tied = set(theirs) - set(ours) | set(ours) - set(theirs)
    assert tied <= {"lm_head.weight"}
    assert {name: ours[name] for name in ours if name in theirs} == {
        name: theirs[name] for name in theirs if name in ours
    }


def test_other_architectures_are_refused():
    with pytest.raises(ValueError, match="architecture='OPTForCausalLM' must be one of Llama"):
        in_hf_words({"architecture": "OPTForCausalLM"})
