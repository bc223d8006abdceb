"""Tensors are ModelOpt's, bit for bit, and so is what config.json says of them.

It needs the environment of ``tools/oracles.sh modelopt``.
"""

import copy
import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from megablocks_core.export import save_trtllm, verify
from megablocks_core.export.quantising.calibration import Calibration
from megablocks_core.export.quantising.recipe import Fp8

mtq = pytest.importorskip("modelopt.torch.quantization", reason="oracle modelopt")
peer = pytest.importorskip("modelopt.torch.export", reason="oracle modelopt")

SIZES = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
# Family, config, and what ModelOpt calls it.
CASES = {
    "llama": ("llama", SIZES, "llama"),
    "llama, tied": ("llama", {**SIZES, "tie_word_embeddings": True}, "llama"),
    "llama, biases": ("llama", {**SIZES, "attention_bias": True, "mlp_bias": True}, "llama"),
    "qwen2": ("qwen2", SIZES, "qwen"),
    "gpt2": ("gpt2", GPT2, "gpt"),
    "gemma": ("gemma", {**SIZES, "head_dim": 8}, "gemma"),
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 4}, "llama"),
}
# What ModelOpt writes otherwise: logits_dtype is a choice, and GPT-2 has learned positions.
SAME = (
    "dtype",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_size",
    "intermediate_size",
    "norm_epsilon",
    "vocab_size",
    "max_position_embeddings",
    "hidden_act",
    "use_parallel_embedding",
    "embedding_sharding_dim",
)


def tiny(family, options):
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.tie_weights()
    config.architectures = [type(model).__name__]
    return model


def exported(model, kind, folder, tp, pp):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.export_tensorrt_llm_checkpoint(
            model,
            kind,
            torch.bfloat16,
            folder,
            inference_tensor_parallel=tp,
            inference_pipeline_parallel=pp,
        )
    return json.loads((folder / "config.json").read_text())


def assert_same_files(theirs, ours, added=()):
    """The same tensors in each rank's file, but for the names that are ours alone."""
    files = sorted(path.name for path in theirs.glob("rank*.safetensors"))
    assert files == sorted(path.name for path in ours.glob("rank*.safetensors"))
    for file in files:
        wanted, found = load_file(theirs / file), load_file(ours / file)
        assert found.keys() - wanted.keys() <= set(added) and not wanted.keys() - found.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype, (file, name)
            assert found[name].shape == tensor.shape, (file, name)
            same = found[name].view(torch.uint8).flatten() == tensor.view(torch.uint8).flatten()
            assert same.all(), (file, name)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("case", list(CASES))
def test_bits_are_theirs(tmp_path, case, tp, pp):
    family, options, kind = CASES[case]
    if family == "mixtral" and transformers.__version__.startswith("5"):
        pytest.fail("ModelOpt reads Mixtral as transformers 4 lays it out")
    model = tiny(family, options)
    save_trtllm(model, tmp_path / "ours", tp=tp, pp=pp)
    verify(tmp_path / "ours", values=True)
    config = exported(model, kind, tmp_path / "theirs", tp, pp)
    # Gemma's tied head is written too.
    added = ("lm_head.weight",) if family == "gemma" else ()
    assert_same_files(tmp_path / "theirs", tmp_path / "ours", added)
    own = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {name: own[name] for name in SAME} == {name: config[name] for name in SAME}
    assert config["mapping"].items() <= own["mapping"].items()
    if "rotary_base" in config and family != "gpt2":
        assert own["rotary_base"] == config["rotary_base"]
    if "moe" in config:
        assert own["moe"] == config["moe"]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_fp8_is_theirs(tmp_path, family, cache, tp):
    options = CASES[family][1]
    model = tiny(family, options)
    plain = copy.deepcopy(model)
    settings = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    if cache:
        kv = mtq.FP8_KV_CFG["quant_cfg"]
        settings = mtq.utils.update_quant_cfg_with_kv_cache_quant(settings, kv)
    tokens = torch.arange(48).view(2, 24) * 7 % 24
    with torch.no_grad():
        quantised = mtq.quantize(model, settings, lambda own: own(tokens))
    inputs, keys, values = {}, {}, {}
    for name, module in quantised.named_modules():
        if name.endswith("input_quantizer") and module.is_enabled:
            inputs[name.replace("input_quantizer", "weight")] = module.amax.item()
        for kind, found in (("k", keys), ("v", values)):
            if name.endswith(f"{kind}_bmm_quantizer") and module.is_enabled:
                owner = name.replace(f"{kind}_bmm_quantizer", f"{kind}_proj.weight")
                found[owner] = module.amax.item()
    assert inputs and bool(keys) == cache
    config = exported(quantised, "llama", tmp_path / "theirs", tp, 1)
    found = Calibration(inputs, keys, values)
    save_trtllm(plain, tmp_path / "ours", tp=tp, recipe=Fp8(kv_cache=cache), calibration=found)
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")
    verify(tmp_path / "ours", values=True)
    own = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization"]
    theirs = config["quantization"]
    assert set(own.pop("exclude_modules")) == set(theirs.pop("exclude_modules"))
    assert own == theirs and own["quant_algo"] == "FP8"
