"""GPT-2's files, new and old, into our tensors and into transformers' model, and back."""

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.export.families import FAMILIES
from tests.export.family_checks import (
    TOKENS,
    check_files,
    check_whole_model,
    num_parameters,
    saved_by_transformers,
)
from tests.export.logical_model import loaded, written

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 9,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"n_inner": 20, "tie_word_embeddings": False},
    {"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"},
)


@pytest.mark.parametrize("options", CASES)
def test_files_and_models_of_transformers(tmp_path, options):
    model = saved_by_transformers("gpt2", {**SIZES, **options}, tmp_path)
    check_files(model, tmp_path)
    check_whole_model(model, tmp_path)


def test_gpt2_has_as_many_parameters_as_was_published():
    sizes = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12}
    assert num_parameters("gpt2", **sizes) == 124_439_808


def test_our_names_are_those_of_llama_where_there_are_such():
    rules = FAMILIES["gpt2"].layout({**SIZES, "n_layer": 1}).rules
    block = [f"self_attn.{name}_proj" for name in "qkvo"] + ["mlp.up_proj", "mlp.down_proj"]
    block += ["input_layernorm", "post_attention_layernorm"]
    parts = [f"model.layers.0.{name}" for name in block] + ["model.norm"]
    names = {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}
    names |= {"model.embed_tokens.weight", "model.positions.weight"}
    assert {name for rule in rules for name in rule.ours} == names


def test_ours_compute_what_their_projections_do(tmp_path):
    """Columns of one matrix are the queries, keys and values; ours are as ``nn.Linear`` has."""
    model = saved_by_transformers("gpt2", SIZES, tmp_path)
    ours: Any = loaded(tmp_path)
    theirs, layer = model.transformer.h[1], getattr(ours.model.layers, "1")
    x = torch.randn(5, 12)
    with torch.no_grad():
        qkv = [
            torch.nn.functional.linear(x, part.weight, part.bias)
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        ]
        torch.testing.assert_close(torch.cat(qkv, dim=-1), theirs.attn.c_attn(x))
        up, down = layer.mlp.up_proj, layer.mlp.down_proj
        inner = torch.nn.functional.linear(x, up.weight, up.bias)
        torch.testing.assert_close(inner, theirs.mlp.c_fc(x))
        outer = torch.nn.functional.linear(inner, down.weight, down.bias)
        torch.testing.assert_close(outer, theirs.mlp.c_proj(inner))
        last = layer.self_attn.o_proj
        mixed = torch.nn.functional.linear(x, last.weight, last.bias)
        torch.testing.assert_close(mixed, theirs.attn.c_proj(x))
    assert torch.equal(ours.model.positions.weight, model.transformer.wpe.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_files_as_published_first_have_no_prefix_and_hold_masks(tmp_path, tied):
    options = {**SIZES, "tie_word_embeddings": tied}
    model = saved_by_transformers("gpt2", options, tmp_path / "new")
    old = _as_published_first(tmp_path / "new", tmp_path / "old")
    assert ("lm_head.weight" in written(old)) != tied
    verify(old)
    with torch.device("meta"):
        again: Any = type(model)(model.config).eval()
    load_hf(again, old, device="cpu")
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    save_hf(loaded(old), tmp_path / "saved", like=old)
    saved, expected = written(tmp_path / "saved"), written(tmp_path / "new")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())


def test_what_is_missing_in_an_old_file_is_named(tmp_path):
    saved_by_transformers("gpt2", SIZES, tmp_path / "new")
    old = _as_published_first(tmp_path / "new", tmp_path / "old")
    tensors = written(old)
    del tensors["h.1.mlp.c_fc.bias"]
    save_file(tensors, old / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['transformer.h.1.mlp.c_fc.bias'\]"):
        verify(old)


def test_cross_attention_is_refused():
    config = {**SIZES, "add_cross_attention": True}
    with pytest.raises(ValueError, match="add_cross_attention=True must be False"):
        FAMILIES["gpt2"].layout(config)


def _as_published_first(new, old):
    """The folder without a prefix, and with the masks that each layer held."""
    old.mkdir()
    shutil.copy(new / "config.json", old)
    tensors = {
        name.removeprefix("transformer."): tensor.clone() for name, tensor in written(new).items()
    }
    size = SIZES["n_positions"]
    for layer in range(SIZES["n_layer"]):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, size, size, dtype=torch.uint8).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, old / "model.safetensors")
    return old
