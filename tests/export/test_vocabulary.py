"""Padded vocabularies leave and enter files without their padding, when asked to."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.groups import Mesh, gather_whole
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import resize_vocab
from megablocks_core.testing import ranks
from tests.export.tiny_models import TOKENS, pretrained, tiny_model

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def _padded(folder, rows=12, mesh=None):
    """A Decoder with more rows than the folder, on meta."""
    spec = replace(DecoderSpec.from_hf(folder), vocab_size=rows)
    return Decoder(spec, mesh=mesh, device="meta")


@ranks(1, 2, 4)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_f_166_padding_is_not_exported_and_comes_again_on_import(tmp_path, family):
    mesh = Mesh(tp=dist.get_world_size())
    world = mesh.group("tp")
    reference = pretrained(tmp_path / "in", family)
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=mesh)
    load_hf(decoder, tmp_path / "in", group=world)
    resize_vocab(decoder, 12, seed=1)
    whole = gather_whole(decoder)
    assert whole["lm_head.weight"].shape == (12, 16) and whole["lm_head.weight"][10:].all()

    save_hf(decoder, tmp_path / "out", group=world, vocab_size=10)
    verify(tmp_path / "out")
    dist.barrier()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 10
    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_file(tmp_path / "in" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(TOKENS).logits, reference(TOKENS).logits)

    padded = _padded(tmp_path / "out", mesh=mesh)
    load_hf(padded, tmp_path / "out", group=world, pad_vocab=True)
    rows = [len(padded.get_parameter(name)) for name in TABLES]
    assert rows == [12 // world.size] * 2
    for name, tensor in gather_whole(padded).items():
        filled = whole[name].clone()
        if name in TABLES:
            filled[10:] = 0
        assert torch.equal(tensor, filled), name
    logits, own = (model(TOKENS, gather_logits=True).logits for model in (padded, decoder))
    assert torch.equal(logits[..., :10], own[..., :10]) and (logits[..., 10:] == 0).all()
    assert_close(logits[..., :10], reference(TOKENS).logits, atol=1e-4, rtol=1e-4)


def test_nothing_is_padded_or_cut_without_being_asked_for(tmp_path):
    pretrained(tmp_path / "in")
    model = _padded(tmp_path / "in").to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"embed_tokens.weight has shape \(12, 16\), on disk \(10"):
        load_hf(model, tmp_path / "in")
    with pytest.raises(ValueError, match=r"has shape \(12, 16\), described as \(10, 16\)"):
        save_hf(model, tmp_path / "out", like=tmp_path / "in")
    small = _padded(tmp_path / "in", rows=8)
    with pytest.raises(ValueError, match="has 8 rows and must have at least the 10 of the files"):
        load_hf(small, tmp_path / "in", pad_vocab=True)
    for size, message in (
        (13, "has 12 rows and must have at least the 13 of the files"),
        (0, "vocab_size=0 must be a positive whole number"),
        (True, "vocab_size=True must be a positive whole number"),
        (2, "vocab_size=2 must be above eos_token_id=2 of the config"),
    ):
        with pytest.raises(ValueError, match=message):
            save_hf(model, tmp_path / "out", vocab_size=size)
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "model_type": "other"}))
    with pytest.raises(ValueError, match="model_type='other' must be known to pad a vocabulary"):
        load_hf(model, tmp_path / "in", pad_vocab=True)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_model_of_transformers_is_padded_too(tmp_path):
    pretrained(tmp_path / "in", "qwen3")
    model = tiny_model("qwen3", vocab_size=12)
    load_hf(model, tmp_path / "in", pad_vocab=True)
    assert (model.lm_head.weight[10:] == 0).all()
    save_hf(model, tmp_path / "out", vocab_size=10)
    files = [(tmp_path / folder / "model.safetensors") for folder in ("in", "out")]
    first, second = (load_file(path) for path in files)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    # Under their own names, which are not ours.
    config = transformers.Mamba2Config(
        vocab_size=10,
        hidden_size=8,
        num_heads=4,
        head_dim=4,
        state_size=4,
        num_hidden_layers=1,
        n_groups=1,
        eos_token_id=2,
    )
    mamba = transformers.Mamba2ForCausalLM(config)
    mamba.save_pretrained(tmp_path / "mamba")
    config.vocab_size = 12
    wide = transformers.Mamba2ForCausalLM(config)
    load_hf(wide, tmp_path / "mamba", pad_vocab=True)
    assert torch.equal(wide.backbone.embeddings.weight[:10], mamba.backbone.embeddings.weight)
    assert (wide.backbone.embeddings.weight[10:] == 0).all()
