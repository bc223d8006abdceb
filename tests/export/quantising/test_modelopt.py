"""ModelOpt's own export has the same tensors, bit for bit, and says the same of itself.

It needs the environment of ``tools/oracles.sh modelopt``.
"""

import copy
import json
from unittest.mock import patch

import pytest
import torch

from megablocks_core.export import save_quantized_hf, verify
from megablocks_core.export.quantising import Fp8, Int4, Int8, Nvfp4
from megablocks_core.export.quantising.calibration import Calibration
from tests.export.quantising.tiny_recipes import tensors_of, tiny
from tests.export.tiny_models import FAMILIES, TOKENS

mtq = pytest.importorskip("modelopt.torch.quantization", reason="oracle modelopt")
peer = pytest.importorskip("modelopt.torch.export", reason="oracle modelopt")

RECIPES = {
    "fp8": (Fp8(kv_cache=False), "FP8_DEFAULT_CFG"),
    "fp8-cache": (Fp8(), "FP8_DEFAULT_CFG"),
    "nvfp4": (Nvfp4(kv_cache=False), "NVFP4_DEFAULT_CFG"),
    "nvfp4-cache": (Nvfp4(), "NVFP4_DEFAULT_CFG"),
    "int8": (Int8(), "INT8_WEIGHT_ONLY_CFG"),
    "int4": (Int4(), "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"),
}
MORE = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 4}),
}


def models(family, dtype):
    architecture, options = MORE[family]
    with patch.dict(FAMILIES, {name: options for name in MORE if name not in FAMILIES}):
        model = tiny(family, dtype, hidden_size=128, intermediate_size=256)
    model.config.architectures = [architecture]
    model.config._attn_implementation = "eager"
    return model


def theirs(model, name, folder):
    """Export a model by ModelOpt, and tell what it has calibrated."""
    recipe, config = RECIPES[name]
    config = copy.deepcopy(getattr(mtq, config))
    if recipe.cache_algorithm:
        config["quant_cfg"] = [*config["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]
    model = mtq.quantize(copy.deepcopy(model), config, lambda one: one(TOKENS))
    found = Calibration({}, {}, {})
    for module_name, module in model.named_modules():
        for kind, quantizer, ending in (
            (found.inputs, "input_quantizer", "weight"),
            (found.keys, "k_bmm_quantizer", "k_proj.weight"),
            (found.values, "v_bmm_quantizer", "v_proj.weight"),
        ):
            amax = getattr(getattr(module, quantizer, None), "_amax", None)
            if amax is not None:
                kind[f"{module_name}.{ending}"] = float(amax)  # type: ignore[index]
    peer.export_hf_checkpoint(model, export_dir=folder)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_every_tensor_is_equal_to_the_bit(tmp_path, name, dtype):
    compare(tmp_path, models("llama", dtype), name)


@pytest.mark.parametrize("name", ["fp8-cache", "nvfp4"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mixtral"])
def test_other_families_are_equal_too(tmp_path, family, name):
    compare(tmp_path, models(family, torch.bfloat16), name)


def compare(tmp_path, model, name):
    calibration = theirs(model, name, tmp_path / "theirs")
    recipe, _ = RECIPES[name]
    save_quantized_hf(model, tmp_path / "ours", recipe=recipe, calibration=calibration)
    ours, others = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    # What TensorRT-LLM asks for beside integers of 4 bits, and ModelOpt's plain rounding lacks.
    more = {one for one in ours if one.endswith(".pre_quant_scale")}
    assert ours.keys() - more == others.keys() and bool(more) == (name == "int4")
    for key, tensor in others.items():
        found = ours[key]
        assert found.dtype == tensor.dtype and found.shape == tensor.shape, key
        bits = (one.reshape(-1).view(torch.uint8) for one in (found, tensor))
        assert torch.equal(*bits), key
    assert all((ours[one] == 1).all() for one in more)
    assert said(tmp_path / "ours", "hf_quant_config.json") == said(
        tmp_path / "theirs", "hf_quant_config.json"
    )
    mine, his = (
        said(tmp_path / one, "config.json")["quantization_config"] for one in ("ours", "theirs")
    )
    if not name.startswith("int"):
        assert mine == his
    else:  # it has no words for integers there
        assert {key: value for key, value in mine.items() if key != "config_groups"} == his
    verify(tmp_path / "ours", values=True)
    verify(tmp_path / "theirs", values=True)


def said(folder, file):
    return json.loads((folder / file).read_text())
