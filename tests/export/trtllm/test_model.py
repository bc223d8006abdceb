"""Which models are served, and which mappings fit them."""

import pytest

from megablocks_core.export.trtllm.mapping import Mapping
from megablocks_core.export.trtllm.model import check_fit, model_of
from tests.export.trtllm.plain import FAMILIES, MAMBA2, SIZES


def words(family, **more):
    return {"model_type": family, **FAMILIES[family], **more}


def test_sizes():
    model = model_of(words("qwen3_moe"))
    assert (model.heads, model.kv_heads, model.head, model.ffn, model.experts) == (4, 2, 6, 8, 4)
    model = model_of(words("gpt2"))
    assert (model.heads, model.kv_heads, model.head, model.ffn) == (4, 4, 4, 64)
    model = model_of(words("mamba2"))
    assert (model.heads, model.kv_heads, model.ffn) == (4, 4, 32)
    assert model_of(words("llama", num_key_value_heads=None)).kv_heads == 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "olmoe"}, "model_type='olmoe' must be one of llama"),
        (words("qwen2", use_sliding_window=True), "use_sliding_window=True .* must be False"),
        ({**words("llama"), "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({**SIZES, "model_type": "mistral", "sliding_window": 8}, "sliding_window=8 .* be null"),
        (words("qwen3", attention_bias=True), "attention_bias=True must be False"),
        (words("qwen3_moe", mlp_only_layers=[1]), r"mlp_only_layers=\[1\]"),
        (words("qwen3_moe", decoder_sparse_step=2), "decoder_sparse_step=2"),
        (words("gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
        (words("gpt2", n_head=3), "n_head=3 must divide n_embd=16"),
    ],
)
def test_what_is_not_served_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        model_of(config)


@pytest.mark.parametrize(
    ("config", "mapping", "message"),
    [
        (words("llama"), {"tp": 3}, "tp=3 must divide heads of queries, of which there are 4"),
        (
            words("llama", num_key_value_heads=3, num_attention_heads=6),
            {"tp": 2},
            "tp=2 must divide the 3 heads of keys and values, or be a multiple",
        ),
        (words("llama", intermediate_size=6), {"tp": 4}, "tp=4 must divide inner features"),
        (words("llama"), {"pp": 4}, "pp=4 must be at most the 3 layers"),
        (words("llama"), {"tp": 2, "moe_ep": 2}, "moe_ep=2 must be 1 for a model without"),
        (words("mixtral", num_local_experts=3), {"tp": 2, "moe_ep": 2}, "moe_ep=2 must divide exp"),
        (words("mixtral", intermediate_size=6), {"tp": 4}, "moe_tp=4 must divide inner features"),
        ({**MAMBA2, "model_type": "mamba2", "n_groups": 2}, {"tp": 4}, "groups of B and C"),
        ({**MAMBA2, "model_type": "mamba2"}, {"tp": 8}, "tp=8 must divide heads, of which"),
    ],
)
def test_mappings_that_do_not_fit_are_named(config, mapping, message):
    with pytest.raises(ValueError, match=message):
        check_fit(model_of(config), Mapping(**mapping))


def test_mappings_that_fit():
    check_fit(model_of(words("llama")), Mapping(4, 3))
    check_fit(model_of(words("mixtral", intermediate_size=6)), Mapping(4, moe_ep=4))
    check_fit(model_of(words("llama", num_key_value_heads=1)), Mapping(4))
