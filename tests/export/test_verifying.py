"""A folder that is not what its config describes is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megablocks_core.export import slabs, verify
from tests.export.tiny_models import pretrained


def test_verify_compares_with_the_config(tmp_path):
    pretrained(tmp_path)
    verify(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "vocab_size": 12}))
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(10, 16\), described as \(12"):
        verify(tmp_path)


def test_values_are_looked_at_if_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(slabs, "SLAB_BYTES", 100)
    pretrained(tmp_path)
    seen = []
    verify(tmp_path, values=True, progress=lambda *how_far: seen.append(how_far))
    total = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert seen[-1] == (total, total) and len(seen) > 40
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][3:5] = torch.inf
    tensors["lm_head.weight"][9, 15] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    verify(tmp_path)
    with pytest.raises(ValueError) as caught:
        verify(tmp_path, values=True)
    for part in ("model.norm.weight has 2 of 16 that", "lm_head.weight has 1 of 160 that"):
        assert part in str(caught.value)


def test_tied_tensors_that_differ_are_named_where_values_are_looked_at(tmp_path, monkeypatch):
    """Old checkpoints hold a tied head too: it must be the table."""
    monkeypatch.setattr(slabs, "SLAB_BYTES", 100)
    pretrained(tmp_path, "qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    verify(tmp_path, values=True)
    head[9, 15] += 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    verify(tmp_path)
    with pytest.raises(ValueError, match=r"lm_head\.weight and .* are tied, but differ"):
        verify(tmp_path, values=True)
