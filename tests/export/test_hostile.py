"""Folders whose config, index or files lie are refused by name, never by what torch trips over."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.files import read_json
from tests.export.tiny_models import pretrained, tiny_model

HUGE = 10**30
SIZES = {
    "hidden_size": ("x", 0, HUGE, 2**40, {}, [1]),
    "num_hidden_layers": ("x", 1.5, HUGE, 2**40, -1, True),
    "num_attention_heads": (0, [], "x", HUGE),
    "head_dim": ({}, HUGE, 1.5, "x"),
    "vocab_size": (HUGE, "x", None, -1),
    "num_key_value_heads": (0, "x", HUGE),
    "intermediate_size": ({}, HUGE, "x", -1),
    "model_type": ([], {}, 3, None),
    "quantization_config": (3, "x", [1], {"quant_method": []}, {"quant_method": None}),
}
OPTIONS = {
    "hidden_act": ([], {}, "x"),
    "rope_parameters": (3, "x", [1], {"rope_type": []}),
    "dtype": (3, "int8", "Tensor", "float16x"),
    "rms_norm_eps": ("x", -1, []),
    "attention_dropout": ("x", [], 2),
}


def _changed(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


@pytest.mark.parametrize("name", SIZES)
def test_configs_that_cannot_be(tmp_path, name):
    model = pretrained(tmp_path / "in")
    before = (tmp_path / "in" / "config.json").read_text()
    for value in SIZES[name]:
        (tmp_path / "in" / "config.json").write_text(before)
        _changed(tmp_path / "in", **{name: value})
        with pytest.raises(ValueError):
            verify(tmp_path / "in")
        with pytest.raises(ValueError):
            decoder_from_hf(tmp_path / "in")
        with pytest.raises(ValueError):
            if name == "quantization_config":
                load_hf(model, tmp_path / "in")
            save_hf(model, tmp_path / "out", like=tmp_path / "in")
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_be(tmp_path, name):
    pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    for value in OPTIONS[name]:
        (tmp_path / "config.json").write_text(before)
        _changed(tmp_path, **{name: value})
        with pytest.raises(ValueError):
            decoder_from_hf(tmp_path)


def test_json_nested_beyond_reason_is_named(tmp_path):
    for text in ("[" * 100_000, '{"a":' * 100_000):
        (tmp_path / "config.json").write_text(text)
        for call in (verify, decoder_from_hf, lambda path: read_json(path / "config.json", dict)):
            with pytest.raises(ValueError, match=r"config\.json is not JSON"):
                call(tmp_path)


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "..", ".", "", "a\0b", 7])
def test_an_index_that_names_what_is_no_file_of_the_folder(tmp_path, file):
    model = pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "a.safetensors")
    places: dict[str, object] = dict.fromkeys(tensors, "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**places, "lm_head.weight": file}}))
    for call in (verify, lambda path: load_hf(model, path)):
        with pytest.raises(ValueError, match="outside its folder|is missing"):
            call(tmp_path)
    index.write_text(json.dumps({"weight_map": places}))
    verify(tmp_path)
    assert torch.equal(model.lm_head.weight, tiny_model().lm_head.weight)
