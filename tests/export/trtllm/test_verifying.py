"""Each kind of damage to a checkpoint is found, and named."""

import json
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from megablocks_core.export import save_trtllm, verify
from megablocks_core.export.quantising.recipe import Fp8, Int8
from megablocks_core.export.trtllm import verifying
from megablocks_core.export.trtllm.verifying import is_trtllm
from tests.export.tiny_models import tiny_model
from tests.export.trtllm.test_saving import calibrated

QKV = "transformer.layers.0.attention.qkv"
FACTOR = f"{QKV}.weights_scaling_factor"


@pytest.fixture
def folder(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    found = calibrated(model.state_dict())
    save_trtllm(model, tmp_path / "out", tp=2, pp=2, recipe=Fp8(), calibration=found)
    verify(tmp_path / "out", values=True)
    assert is_trtllm(tmp_path / "out")
    return tmp_path / "out"


def changed(folder, rank=1, **changes):
    """Other tensors in a rank's file; ``None`` leaves one out."""
    file = folder / f"rank{rank}.safetensors"
    tensors = {**load_file(file), **{name.replace("__", "."): v for name, v in changes.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def test_tensors_that_are_missing_or_are_others(folder):
    changed(folder, **{QKV + ".weight": None})
    with pytest.raises(ValueError, match=rf"rank1.safetensors: missing \['{QKV}.weight'\]"):
        verify(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("more.weight", torch.zeros(2), r"not described \['more.weight'\]"),
        (f"{QKV}.weight", torch.zeros(3, 16).to(torch.float8_e4m3fn), r"shape \(3, 16\), descr"),
        (FACTOR, torch.ones(1).bfloat16(), "is torch.bfloat16, described as torch.float32"),
        (FACTOR, torch.ones(2), r"shape \(2,\), described as \(1,\)"),
        (f"{QKV}.weight", torch.zeros(16, 16).bfloat16(), "is torch.bfloat16, described as"),
    ],
)
def test_headers(folder, name, tensor, message):
    changed(folder, **{name: tensor})
    with pytest.raises(ValueError, match=message):
        verify(folder)


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
def test_factors(folder, value):
    changed(folder, **{FACTOR: torch.tensor([value])})
    verify(folder)
    rule = rf"factors above 0: rank1\.safetensors: {FACTOR} has 1 of 1 that are not"
    with pytest.raises(ValueError, match=rule):
        verify(folder, values=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_values(folder, dtype):
    name = f"{QKV}.weight" if dtype.itemsize == 1 else "transformer.layers.0.input_layernorm.weight"
    tensor = load_file(folder / "rank1.safetensors")[name].float()
    tensor.view(-1)[3] = torch.nan
    changed(folder, **{name: tensor.to(dtype)})
    seen = []
    with pytest.raises(ValueError, match=rf"{name} has 1 of {tensor.numel()} that are not"):
        verify(folder, values=True, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)


def test_files(folder):
    (folder / "rank2.safetensors").rename(folder / "rank4.safetensors")
    (folder / "rank3.safetensors").write_bytes(b"abc")
    with pytest.raises(ValueError) as caught:
        verify(folder)
    for part in ("rank2.safetensors is missing", "rank4.safetensors is of no rank"):
        assert part in str(caught.value)
    assert "rank3.safetensors is damaged or cut short" in str(caught.value)
    with pytest.raises(ValueError, match="config.json is missing"):
        verify(folder.parent)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_hidden_layers": 3}, r"rank1.safetensors: missing \['transformer.layers.1"),
        ({"num_key_value_heads": 4}, "has shape"),
        ({"mapping": {"tp_size": 1, "pp_size": 2}}, "rank2.safetensors is of no rank"),
        ({"mapping": {"tp_size": 2, "pp_size": 2, "world_size": 8}}, "must be of tp_size"),
        ({"mapping": {"tp_size": "2"}}, "tp='2' must be a whole number"),
        ({"mapping": 4}, "mapping=4 must be an object of sizes"),
        ({"dtype": "float16"}, "described as torch.float16"),
        ({"dtype": "int8"}, "dtype='int8' must be one of"),
        ({"architecture": "Other"}, "architecture='Other' must be one of"),
        ({"hidden_size": None}, "hidden_size"),
        ({"quantization": {"quant_algo": None}}, r"not described \['transformer.layers.0"),
        ({"quantization": {"quant_algo": "INT3"}}, "quant_algo='INT3' must be one of"),
        ({"vocab_size_padded": 64}, "vocab_size_padded=64 must be 10"),
    ],
)
def test_configs(folder, entries, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    with pytest.raises(ValueError, match=message):
        verify(folder)


def test_a_config_that_asks_for_many_ranks_costs_little(folder):
    config = json.loads((folder / "config.json").read_text())
    entries = {"num_attention_heads": 4096, "num_key_value_heads": 4096, "head_size": 1}
    entries |= {"vocab_size_padded": 4096, "intermediate_size": 4096}
    entries |= {"mapping": {"tp_size": 4096, "pp_size": 2}}
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    with patch.object(verifying, "tensors", wraps=verifying.tensors) as made:
        with pytest.raises(ValueError, match="rank8191.safetensors is missing"):
            verify(folder)
        assert made.call_count == 4


def test_layers_that_stay_as_they_are(tmp_path):
    """Names of modules are those of a stage, so that what stays does so in all of them."""
    model = tiny_model(dtype=torch.bfloat16)
    found = calibrated(model.state_dict())
    recipe = Fp8(exclude=("*.o_proj",), kv_cache=False)
    save_trtllm(model, tmp_path / "out", pp=2, recipe=recipe, calibration=found)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "transformer.layers.0.attention.dense"],
    }
    verify(tmp_path / "out", values=True)
    with pytest.raises(ValueError, match="of all stages, or of none"):
        recipe = Fp8(exclude=("model.layers.1.*",))
        save_trtllm(model, tmp_path / "no", pp=2, recipe=recipe, calibration=found)


def test_integers_are_made_by_the_runtime(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    save_trtllm(model, tmp_path / "out", recipe=Int8())
    save_trtllm(model, tmp_path / "plain")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == {"quant_algo": "W8A16", "kv_cache_quant_algo": None}
    file = "rank0.safetensors"
    assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    verify(tmp_path / "out")
