"""Folders of Mamba's authors: their names, their configs and their pickles of weights."""

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.export.families import family_of
from megablocks_core.layers import Decoder, DecoderSpec

F64 = torch.float64
TOKENS = torch.arange(14).view(2, 7) * 5 % 50
COMMON = {"d_model": 32, "n_layer": 2, "vocab_size": 50, "rms_norm": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "Mamba1": {**COMMON, "ssm_cfg": {}, "pad_vocab_size_multiple": 8},
    "Mamba2": {
        **COMMON,
        "ssm_cfg": {"layer": "Mamba2", "d_state": 16, "headdim": 8, "ngroups": 2},
        "tie_embeddings": False,
        "pad_vocab_size_multiple": 1,
    },
}


def _theirs(layer: str) -> Any:
    """The same model in transformers, in float64."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 16}
    if layer == "Mamba1":
        config = transformers.MambaConfig(**sizes, vocab_size=56)
        model = transformers.MambaForCausalLM(config)
    else:
        heads = {"num_heads": 8, "head_dim": 8, "n_groups": 2}
        config = transformers.Mamba2Config(**sizes, **heads, vocab_size=50)
        model = transformers.Mamba2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] not in ("A_log", "D", "dt_bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(F64)


def _folder(tmp_path, layer):
    """As published: one pickle, in which a tied head is written too."""
    tensors = {
        name.replace("backbone.embeddings", "backbone.embedding"): tensor
        for name, tensor in _theirs(layer).state_dict().items()
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[layer]))
    return tmp_path, tensors


@pytest.mark.parametrize("layer", CONFIGS)
def test_logits_and_gradients_are_those_of_transformers(tmp_path, layer):
    folder, _ = _folder(tmp_path, layer)
    verify(folder)
    ours, theirs = decoder_from_hf(folder, dtype=F64), _theirs(layer)
    logits, wanted = ours(TOKENS).logits, theirs(TOKENS, use_cache=False).logits
    assert (logits - wanted).norm() < 1e-6 * wanted.norm()
    logits.sin().sum().backward()
    wanted.sin().sum().backward()
    gradients = {name: x.grad for name, x in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if "mixer" in name or "norm.weight" in name:
            theirs_name = name.replace("model.norm.", "model.norm_f.")
            wanted = gradients[theirs_name.replace("model.", "backbone.", 1)]
            assert (parameter.grad - wanted).norm() < 1e-5 * wanted.norm(), name


@pytest.mark.parametrize("layer", CONFIGS)
def test_what_is_saved_has_their_names_and_reads_alike(tmp_path, layer):
    (tmp_path / "published").mkdir()
    folder, tensors = _folder(tmp_path / "published", layer)
    decoder = decoder_from_hf(folder, dtype=F64)
    save_hf(decoder, tmp_path / "saved")
    verify(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    tied = {"lm_head.weight"} if layer == "Mamba1" else set()
    assert saved.keys() == tensors.keys() - tied
    for name, tensor in saved.items():
        assert torch.equal(tensor, tensors[name]), name
    again = Decoder(DecoderSpec.from_hf(tmp_path / "saved"), dtype=F64)
    load_hf(again, tmp_path / "saved")
    assert torch.equal(again(TOKENS).logits, decoder(TOKENS).logits)


def test_options_of_blocks_reach_the_table():
    config = CONFIGS["Mamba1"] | {"ssm_cfg": {"bias": True, "conv_bias": False, "dt_rank": 5}}
    schema = family_of(config).layout(config).schema
    assert "backbone.layers.0.mixer.in_proj.bias" in schema
    assert "backbone.layers.0.mixer.conv1d.bias" not in schema
    assert schema["backbone.layers.1.mixer.dt_proj.weight"] == (64, 5)


def test_configs_of_nobody_have_no_family():
    assert family_of({"hidden_size": 4}) is None
    assert family_of({"d_model": 4, "ssm_cfg": {"layer": "Mamba3"}}) is None
