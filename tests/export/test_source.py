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
    other = good["weight_map"]["model.embed_tokens.weight"]
    assert file != other
    for weight_map, message in (
        ({**good["weight_map"], "ghost": file}, r"only in the index \['ghost'\]"),
        ({**good["weight_map"], "ghost": "../model.safetensors"}, "files outside its folder"),
        ({**good["weight_map"], "ghost": "/etc/passwd"}, "files outside its folder"),
        ({**good["weight_map"], "ghost": "model-9.safetensors"}, "model-9.safetensors is missing"),
        ({**good["weight_map"], "ghost": ""}, "files outside its folder"),
        ({**good["weight_map"], "ghost": 5}, "5 is missing"),
        ({**good["weight_map"], "ghost": ".."}, "is missing"),
        ({**good["weight_map"], "model.norm.weight": other}, r"says \['model.norm.weight'\]"),
        ({}, "must have a weight_map"),
        ([], "must have a weight_map"),
    ):
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=message):
            load_hf(model, tmp_path / "a")
    path.write_text(json.dumps(good))
    norm = load_file(tmp_path / "a" / file)["model.norm.weight"]
    tensors = {**load_file(tmp_path / "a" / other), "model.norm.weight": norm}
    save_file(tensors, tmp_path / "a" / other)
    for read in (verify, lambda folder: load_hf(model, folder)):
        with pytest.raises(ValueError, match=r"another file holds too: \['model.norm.weight'\]"):
            read(tmp_path / "a")


def test_links_are_followed_as_the_cache_of_the_hub_has_them(tmp_path):
    model = _model()
    model.save_pretrained(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{path.name}")
    (tmp_path / "link").symlink_to("snapshot", target_is_directory=True)
    verify(tmp_path / "link")
    load_hf(_model(), tmp_path / "link")
    (tmp_path / "blobs" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors is missing"):
        load_hf(_model(), tmp_path / "link")


@pytest.mark.parametrize(
    "kind", ["file", "empty folder", "no folder", "empty file", "folder of it"]
)
def test_what_is_no_folder_of_a_model_is_refused(tmp_path, kind):
    path, message = tmp_path / "a", "config.json is missing"
    if kind == "file":
        path.write_text("{}")
    elif kind != "no folder":
        path.mkdir()
    if kind in ("empty file", "folder of it"):
        _model().save_pretrained(path)
        weights = path / "model.safetensors"
        weights.unlink()
        message = "model.safetensors is missing"
        if kind == "empty file":
            weights.touch()
            message = "model.safetensors is damaged or cut short"
        else:
            weights.mkdir()
    for read in (verify, lambda folder: load_hf(_model(), folder)):
        with pytest.raises(ValueError, match=message):
            read(path)
