"""Every kind of damage to a quantised folder is found and named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megablocks_core.export import load_hf, save_hf, save_quantized_hf
from megablocks_core.export.quantising.config import FILE
from megablocks_core.export.quantising.verifying import is_quantised, verify_quantised
from tests.export.quantised_folders import (
    FP8,
    edit_config,
    quantise_fp8,
    quantise_mxfp4,
    quantised_fp8,
    tiny_gpt_oss,
)
from tests.export.quantising.tiny_recipes import RECIPES, calibrated, tiny
from tests.export.tiny_models import pretrained

K = "model.layers.0.self_attn.k_proj"
DOWN = "model.layers.1.mlp.down_proj"


def written(folder, name):
    model = tiny()
    save_quantized_hf(
        model, folder, recipe=RECIPES[name], calibration=calibrated(model.state_dict())
    )
    return folder


def change(folder, name, made):
    """Put another tensor under a name, or none."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    if made is not None:
        tensors[name] = made
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("recipe", "name", "made", "message"),
    [
        ("fp8", f"{K}.input_scale", None, rf"missing \['{K}.input_scale'\]"),
        ("fp8", f"{K}.k_scale", None, rf"missing \['{K}.k_scale'\]"),
        ("fp8", f"{K}.weight_scale", None, f"{K}.weight_scale is missing"),
        ("fp8", f"{K}.weight", None, f"{K}.weight is missing, but"),
        ("fp8", f"{K}.k_scale", torch.ones(2), r"k_scale has shape \(2,\), described as \(\)"),
        ("fp8", f"{K}.input_scale", torch.tensor(1.0).half(), "is F16 and must be F32"),
        ("fp8", f"{K}.weight_scale", torch.ones(3), r"weight_scale has shape \(3,\)"),
        ("fp8", "lm_head.weight", torch.ones(10, 32).to(torch.float8_e4m3fn), "lm_head.weight"),
        ("fp8", "model.norm.weight", None, r"missing \['model.norm.weight'\]"),
        ("fp8", "model.extra.weight", torch.ones(3), "not described"),
        ("fp8-blocks", f"{DOWN}.weight_scale_inv", None, "weight_scale_inv is missing"),
        ("fp8-blocks", f"{DOWN}.weight_scale_inv", torch.ones(2, 3), "must have"),
        ("nvfp4", f"{DOWN}.weight_scale_2", None, "weight_scale_2 is missing"),
        ("nvfp4", f"{DOWN}.weight_scale", torch.ones(32, 3), "is F32 and must be F8_E4M3"),
        ("nvfp4", f"{DOWN}.weight", torch.ones(32, 20, dtype=torch.uint8), "weight_scale has"),
        ("nvfp4", f"{DOWN}.input_scale", None, rf"missing \['{DOWN}.input_scale'\]"),
        ("int8", f"{DOWN}.weight", torch.ones(31, 48, dtype=torch.int8), "weight_scale has shape"),
        ("int8", f"{DOWN}.weight", torch.ones(32, 48), "is F32 and must be I8"),
        ("int4", f"{DOWN}.weight_scale", torch.ones(32, 2), "described as"),
        ("int4", f"{DOWN}.pre_quant_scale", torch.ones(47), "must have"),
    ],
)
def test_headers_show(tmp_path, recipe, name, made, message):
    folder = written(tmp_path / "out", recipe)
    verify_quantised(folder)
    change(folder, name, made)
    with pytest.raises(ValueError, match=message):
        verify_quantised(folder)


@pytest.mark.parametrize(
    ("recipe", "name", "value"),
    [
        ("fp8", f"{K}.input_scale", 0.0),
        ("fp8", f"{K}.k_scale", -1.0),
        ("fp8", f"{K}.weight_scale", torch.inf),
        ("fp8", f"{K}.weight", torch.nan),
        ("fp8-blocks", f"{DOWN}.weight_scale_inv", 0.0),
        ("nvfp4", f"{DOWN}.weight_scale", torch.nan),
        ("nvfp4", f"{DOWN}.weight_scale_2", 0.0),
        ("int8", f"{DOWN}.weight_scale", 0.0),
        ("int4", f"{DOWN}.pre_quant_scale", torch.nan),
        ("int4", "model.norm.weight", torch.inf),
    ],
)
def test_values_show(tmp_path, recipe, name, value):
    folder = written(tmp_path / "out", recipe)
    seen = []
    verify_quantised(folder, values=True, progress=lambda *found: seen.append(found))
    tensors = load_file(folder / "model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert seen[-1] == (total, total) and len(seen) == len(tensors)
    damaged = tensors[name].float()
    damaged.view(-1)[-1] = value
    change(folder, name, damaged.to(tensors[name].dtype))
    verify_quantised(folder)
    with pytest.raises(ValueError, match=rf"scales above 0: {name} has 1 of {damaged.numel()}"):
        verify_quantised(folder, values=True)


def test_a_config_that_says_other_than_the_files_is_named(tmp_path):
    folder = written(tmp_path / "out", "int8")
    said = json.loads((folder / FILE).read_text())
    said["quantization"]["exclude_modules"] = []
    (folder / FILE).write_text(json.dumps(said))
    with pytest.raises(ValueError, match="must say the same"):
        verify_quantised(folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config={**config, "ignore": []})
    verify_quantised(folder)  # what is plain beside the layers need not be said
    excluded = [*config["ignore"], DOWN]
    (folder / FILE).unlink()
    edit_config(folder, quantization_config={**config, "ignore": excluded})
    with pytest.raises(ValueError, match=f"{DOWN}.weight is I8, but excluded"):
        verify_quantised(folder)
    edit_config(folder, quantization_config=None)
    with pytest.raises(ValueError, match="must be quantised by a recipe"):
        verify_quantised(folder)


def test_which_folders_are_quantised_by_a_recipe(tmp_path):
    assert is_quantised(written(tmp_path / "int4", "int4"))
    edit_config(tmp_path / "int4", quantization_config=None)
    assert is_quantised(tmp_path / "int4")  # its file says so
    save_hf(tiny(), tmp_path / "plain")
    assert not is_quantised(tmp_path / "plain")
    tiny_gpt_oss().save_pretrained(tmp_path / "mxfp4")
    quantise_mxfp4(tmp_path / "mxfp4")
    assert not is_quantised(tmp_path / "mxfp4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_folders_of_blocks_say_less_and_are_whole(tmp_path, dtype):
    pretrained(tmp_path, dtype=torch.bfloat16)
    quantise_fp8(tmp_path, scale_dtype=dtype)
    assert is_quantised(tmp_path)
    verify_quantised(tmp_path, values=True)


def test_a_published_folder_of_blocks_says_not_what_it_leaves_plain(tmp_path):
    pretrained(tmp_path, dtype=torch.bfloat16)
    weight = f"{DOWN}.weight"
    plain = load_file(tmp_path / "model.safetensors")[weight]
    quantise_fp8(tmp_path)
    change(tmp_path, f"{weight}_scale_inv", None)
    change(tmp_path, weight, plain)
    verify_quantised(tmp_path, values=True)
    change(tmp_path, weight, plain[:-1].clone())
    with pytest.raises(ValueError, match=rf"{weight} has shape \(15, 24\), described as"):
        verify_quantised(tmp_path)
    change(tmp_path, weight, None)
    with pytest.raises(ValueError, match=rf"missing \['{weight}'\]"):
        verify_quantised(tmp_path)


def test_a_published_folder_of_blocks_may_hold_stacks_of_experts(tmp_path):
    tiny_gpt_oss().save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    stack = load_file(tmp_path / "model.safetensors")[name]
    numbers, scales = quantised_fp8(stack, (8, 16))
    change(tmp_path, name, numbers)
    change(tmp_path, f"{name}_scale_inv", scales)
    edit_config(tmp_path, quantization_config={**FP8, "weight_block_size": [8, 16]})
    verify_quantised(tmp_path, values=True)
    load_hf(tiny_gpt_oss(), tmp_path)
    scales[3] = 0
    change(tmp_path, f"{name}_scale_inv", scales)
    with pytest.raises(ValueError, match=f"{name}_scale_inv has 16 of 64 that are not"):
        verify_quantised(tmp_path, values=True)


def test_a_tied_head_beside_quantised_weights_must_be_the_table(tmp_path):
    pretrained(tmp_path, "qwen3", dtype=torch.bfloat16)
    quantise_fp8(tmp_path)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, "lm_head.weight", table.clone())
    verify_quantised(tmp_path, values=True)
    change(tmp_path, "lm_head.weight", -table)
    with pytest.raises(ValueError, match=r"lm_head\.weight and .* are tied, but differ"):
        verify_quantised(tmp_path, values=True)
    edit_config(tmp_path, model_type="nobodys")
    with pytest.raises(ValueError, match="model_type='nobodys' must be one of"):
        verify_quantised(tmp_path)
