"""Folders and checkpoints are seen alike by exporters."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from megablocks_core.auto.sources import described_source, is_hf_folder
from megablocks_core.ckpt import CheckpointError
from megablocks_core.export import save_hf, save_quantized_hf
from megablocks_core.export.quantising import Int8
from tests.auto.runs import save, trained
from tests.export.quantised_folders import edit_config
from tests.export.quantising.tiny_recipes import tiny


def values_of(found):
    """All tensors of the files."""
    seen = {}
    wanted = [
        (name, found.ours.needs(made, tuple(slice(0, size) for size in made.get_shape())))
        for name, made in found.made.items()
    ]

    def noted(name, values):
        made = found.made[name]
        box = tuple(slice(0, size) for size in made.get_shape())
        seen[name] = found.ours.values(made, box, values).clone()

    found.collection.visit({0: wanted}, noted)
    return seen


def test_a_checkpoint_and_the_folder_of_it_hold_the_same(tmp_path):
    model, *rest = trained("llama", {}, dtype=torch.float32)
    save(tmp_path / "step-1", model, *rest)
    save_hf(model, tmp_path / "hf")
    assert is_hf_folder(tmp_path / "hf") and not is_hf_folder(tmp_path / "step-1")
    reports = {"hf": [], "step-1": []}
    both = [
        described_source(tmp_path / name, progress=lambda *one, to=reports[name]: to.append(one))
        for name in reports
    ]
    for reported in reports.values():
        assert reported[-1][0] * 2 == reported[-1][1] > 0
    assert both[0].wholes == both[1].wholes
    first, second = map(values_of, both)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert first.keys() == second.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(first[name], tensor) and torch.equal(second[name], tensor), name
    narrow = described_source(tmp_path / "hf", dtype=torch.bfloat16).wholes
    assert {whole.dtype for whole in narrow} == {torch.bfloat16}


def test_a_quantised_folder_is_seen_as_what_it_stands_for(tmp_path):
    model = tiny()
    save_quantized_hf(model, tmp_path / "int8", recipe=Int8())
    found = described_source(tmp_path / "int8")
    assert "quantization_config" not in found.config
    assert {whole.dtype for whole in found.wholes} == {torch.bfloat16}
    near = values_of(found)
    for name, tensor in model.state_dict().items():
        assert (near[name].float() - tensor.float()).norm() < 0.01 * tensor.float().norm()


def test_what_is_no_source_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="none is no checkpoint"):
        described_source(tmp_path / "none")
    model = tiny("qwen3")
    save_hf(model, tmp_path / "hf")
    for words in ({"entry": "average"}, {"config": "config.json"}):
        with pytest.raises(ValueError, match=f"{next(iter(words))} must not be given"):
            described_source(tmp_path / "hf", **words)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    assert "lm_head.weight" not in described_source(tmp_path / "hf").made
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path)
    with pytest.raises(ValueError, match="are tied, but differ on disk"):
        described_source(tmp_path / "hf")
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"][0] = torch.inf
    save_file(tensors, path)
    with pytest.raises(ValueError, match="must be finite, but are not in model.norm.weight"):
        described_source(tmp_path / "hf")
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\]"):
        described_source(tmp_path / "hf")
    edit_config(tmp_path / "hf", model_type="nobody")
    with pytest.raises(ValueError, match="model_type='nobody' must be one of"):
        described_source(tmp_path / "hf")
