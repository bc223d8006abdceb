"""Files of Qwen3-Next and Qwen3.5 into our tensors and into transformers' model, and back."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import verify
from megablocks_core.export.families import FAMILIES
from megablocks_core.layers.ssm import GatedDeltaNet
from tests.export.family_checks import (
    TOKENS,
    check_files,
    check_whole_model,
    num_parameters,
    saved_by_transformers,
)
from tests.export.logical_model import written

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense-layers": {"mlp_only_layers": [1], "decoder_sparse_step": 2, "attention_bias": True},
    "no-experts": {"num_experts": 0, "tie_word_embeddings": True},
    "attention-first": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
    },
}


OF_QWEN3_5: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "tie_word_embeddings": True, "num_experts": 2},
    "one-value-head": {"linear_num_value_heads": 2, "linear_num_key_heads": 2},
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("qwen3_next", options) for options in CASES.values()),
        *(("qwen3_5_text", options) for options in OF_QWEN3_5.values()),
        *(("qwen3_5_moe_text", options) for options in OF_QWEN3_5.values()),
    ],
)
def test_files_and_models_of_transformers(tmp_path, family, options):
    model = saved_by_transformers(family, {**SIZES, **options}, tmp_path)
    check_files(model, tmp_path)
    check_whole_model(model, tmp_path)


def test_qwen3_next_has_eighty_billion_parameters():
    sizes = {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48}
    assert num_parameters("qwen3_next", **sizes) == 79_674_391_296


def test_each_fourth_layer_attends_where_nothing_is_said():
    config = {**SIZES, "num_hidden_layers": 8}
    assert _attending(config) == [3, 7]
    assert _attending({**config, "full_attention_interval": 3}) == [2, 5]


def test_predictors_of_later_tokens_are_left_aside(tmp_path):
    """Published files hold one layer more, which transformers does not read either."""
    model = saved_by_transformers("qwen3_next", SIZES, tmp_path)
    tensors = written(tmp_path)
    attending = "model.layers.3."
    tensors |= {
        name.replace(attending, "mtp.layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(attending)
    }
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(16)
    tensors["mtp.fc.weight"] = torch.zeros(16, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    verify(tmp_path)
    decoder = decoder_from_hf(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            decoder(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4
        )
    save_file({**tensors, "mtp.fc.bias": torch.zeros(16)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="mtp.fc.bias"):
        verify(tmp_path)


def test_names_and_shapes_are_those_of_our_layers():
    """Nothing is taken apart: the layers pack what the files pack."""
    rules = FAMILIES["qwen3_next"].layout(SIZES).rules
    assert not any(rule.operations for rule in rules)
    net = GatedDeltaNet(
        16, num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=5, device="meta"
    )
    shapes = {name: shape for rule in rules for name, shape in rule.shapes.items()}
    for name, parameter in net.named_parameters():
        assert shapes.pop(f"model.layers.0.mixer.{name}") == tuple(parameter.shape)
    assert not [name for name in shapes if name.startswith("model.layers.0.mixer.")]


def _attending(config):
    names = FAMILIES["qwen3_next"].layout(json.loads(json.dumps(config))).schema
    return [n for n in range(8) if f"model.layers.{n}.self_attn.q_proj.weight" in names]
