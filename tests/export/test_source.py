"""A folder that is not whole is refused by name."""

import json

import pytest
import transformers
from safetensors.torch import load_file, save_file

from megablocks_core.export import load_hf, save_hf, verify


def _model():
    config = transformers.LlamaConfig(
        vocab_size=10,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("damage", ["cut", "flipped header", "missing", "no config", "pickle"])
def test_damaged_folders_are_refused_by_name(tmp_path, damage):
    _model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    message = "model.safetensors"
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "flipped header":
        path.write_bytes(data[:8] + b"?" + data[9:])
    elif damage == "missing":
        path.unlink()
    elif damage == "no config":
        (tmp_path / "config.json").unlink()
        message = "config.json is missing"
    else:
        path.rename(tmp_path / "pytorch_model.bin")
        message = "are pickles"
    for read in (verify, lambda folder: load_hf(_model(), folder)):
        with pytest.raises(ValueError, match=message):
            read(tmp_path)


def test_index_and_files_must_agree(tmp_path):
    model = _model()
    save_hf(model, tmp_path / "a", max_file_bytes=3000)
    path = tmp_path / "a" / "model.safetensors.index.json"
    good = json.loads(path.read_text())
    file = good["weight_map"]["model.norm.weight"]
    twice = good["weight_map"]["lm_head.weight"]
    for weight_map, message in (
        ({**good["weight_map"], "ghost": file}, r"only in the index \['ghost'\]"),
        ({**good["weight_map"], "ghost": "../model.safetensors"}, "files outside its folder"),
        ({**good["weight_map"], "ghost": "model-9.safetensors"}, "model-9.safetensors is missing"),
        ({}, "must have a weight_map"),
    ):
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=message):
            load_hf(model, tmp_path / "a")
    path.write_text(json.dumps(good))
    tensors = {**load_file(tmp_path / "a" / file), **load_file(tmp_path / "a" / twice)}
    save_file(tensors, tmp_path / "a" / file)
    if file != twice:
        with pytest.raises(ValueError, match="holds tensors that another file holds too"):
            load_hf(model, tmp_path / "a")
