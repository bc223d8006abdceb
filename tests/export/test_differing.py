"""Each difference of two folders is one line; equal ones have none."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megablocks_core.export import load_hf, save_hf
from megablocks_core.export import slabs as slabs_module
from megablocks_core.export.differing import diff
from megablocks_core.layers import Decoder, DecoderSpec
from tests.export.tiny_models import pretrained


def test_equal_tensors_in_other_files_are_no_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(slabs_module, "SLAB_BYTES", 100)
    pretrained(tmp_path / "a")
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "a"))
    load_hf(decoder, tmp_path / "a")
    for name, most in (("b", 2000), ("c", 10**6)):
        save_hf(decoder, tmp_path / name, like=tmp_path / "a", max_file_bytes=most)
    assert list(diff(tmp_path / "b", tmp_path / "c")) == []
    assert len(list((tmp_path / "b").iterdir())) > len(list((tmp_path / "c").iterdir()))


def test_every_kind_of_difference_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(slabs_module, "SLAB_BYTES", 100)
    for name in "ab":
        pretrained(tmp_path / name)
    path = tmp_path / "b" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][[0, 9]] = torch.tensor([4.0, torch.nan])
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16().float().bfloat16()
    tensors["new"] = tensors.pop("model.layers.0.mlp.up_proj.bias")
    tensors["model.layers.1.mlp.up_proj.bias"] = torch.ones(3)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    config["rms_norm_eps"], config["more"] = 1e-5, [1]
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    (tmp_path / "b" / "generation_config.json").write_text("{}")
    found = list(diff(tmp_path / "a", tmp_path / "b"))
    assert found[:2] == ["config.rms_norm_eps: 1e-06 and 1e-05", "only in the second: config.more"]
    texts = dict(line.removeprefix("tensor ").partition(": ")[::2] for line in found)
    assert "tensor lm_head.weight: dtype F32 and BF16" in found
    assert texts["model.norm.weight"].startswith("2 of 16 values differ, by at most inf")
    assert texts["model.layers.1.mlp.up_proj.bias"] == "shape [24] and [3]"
    assert "only in the first: tensor model.layers.0.mlp.up_proj.bias" in found
    assert "only in the second: tensor new" in found
    assert found[-2:] == [
        "file generation_config.json: differs",
        "only in the second: file tokenizer.json",
    ]


def test_a_folder_that_is_not_whole_is_an_error(tmp_path):
    pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match="config.json is missing"):
        list(diff(tmp_path / "a", tmp_path / "none"))
