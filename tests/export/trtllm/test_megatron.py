"""Tensors of Llama are those of Megatron-Core's converter on one device, bit for bit.

It needs the environment of ``tools/oracles.sh megatron``. Megatron asks TensorRT-LLM for two
functions, which are not converters: those are given here.
"""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from megablocks_core.export import save_trtllm
from tests.export.logical_model import written

converter = pytest.importorskip(
    "megatron.core.export.trtllm.trtllm_weights_converter."
    "single_device_trtllm_model_weights_converter",
    reason="oracle megatron",
)
HEADS, CACHED, HEAD = 4, 2, 8
SIZES = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": CACHED,
}


def grouped(query, key, value):
    """Megatron's order: the queries of a group, then its key and its value."""
    parts = zip(query.chunk(CACHED), key.chunk(CACHED), value.chunk(CACHED), strict=True)
    return torch.cat([torch.cat(group) for group in parts])


def in_megatron_words(whole):
    found = {
        "embedding.word_embeddings.weight": whole["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": whole["model.norm.weight"],
        "output_layer.weight": whole["lm_head.weight"],
    }
    for layer in range(2):
        own, theirs = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attention, mlp = f"{own}.self_attn", f"{own}.mlp"
        for kind in ("weight", "bias"):
            parts = [whole[f"{attention}.{name}_proj.{kind}"] for name in "qkv"]
            found[f"{theirs}.self_attention.linear_qkv.{kind}"] = grouped(*parts)
            found[f"{theirs}.self_attention.linear_proj.{kind}"] = whole[
                f"{attention}.o_proj.{kind}"
            ]
        both = [whole[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up")]
        found[f"{theirs}.mlp.linear_fc1.weight"] = torch.cat(both)
        found[f"{theirs}.mlp.linear_fc2.weight"] = whole[f"{mlp}.down_proj.weight"]
        norms = {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
        }
        for name, norm in norms.items():
            found[f"{theirs}.{name}.weight"] = whole[f"{own}.{norm}.weight"]
    return found


def converted(monkeypatch, whole, tp, pp):
    export = "megatron.core.export"
    dtypes = import_module(f"{export}.data_type")
    settings = import_module(f"{export}.export_config")
    names = import_module(f"{export}.trtllm.model_to_trllm_mapping.default_conversion_dict")
    configs = import_module("megatron.core.transformer.transformer_config")
    monkeypatch.setattr(converter, "str_dtype_to_torch", lambda _: torch.bfloat16)
    monkeypatch.setattr(converter, "pad_vocab_size", lambda size, by: -(-size // by) * by)
    config = configs.TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=HEADS,
        num_query_groups=CACHED,
        kv_channels=HEAD,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        normalization="RMSNorm",
    )
    made = converter.SingleDeviceTRTLLMModelWeightsConverter(
        settings.ExportConfig(tp, pp, use_parallel_embedding=True), config, dtypes.DataType.bfloat16
    )
    made.convert(in_megatron_words(whole), dict(names.DEFAULT_CONVERSION_DICT))
    stages = torch.arange(2).tensor_split(pp)
    return [
        made.get_local_model_weights_per_gpu(
            SimpleNamespace(
                tp_rank=tp_rank,
                tp_size=tp,
                pp_layers=lambda _, stage=stage: stage.tolist(),
                is_first_pp_rank=lambda at=at: at == 0,
                is_last_pp_rank=lambda at=at: at == pp - 1,
            ),
            {},
        )
        for at, stage in enumerate(stages)
        for tp_rank in range(tp)
    ]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_bits_are_theirs(tmp_path, monkeypatch, tp, pp):
    torch.manual_seed(4)
    config = transformers.LlamaConfig(**SIZES, attention_bias=True)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "in")
    save_trtllm(model, tmp_path / "out", tp=tp, pp=pp)
    expected = converted(monkeypatch, written(tmp_path / "in"), tp, pp)
    for rank, wanted in enumerate(expected):
        found = load_file(tmp_path / "out" / f"rank{rank}.safetensors")
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
