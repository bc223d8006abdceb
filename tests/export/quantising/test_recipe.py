"""Recipes take a layer's large matrices by name, and nothing else unless they are told to."""

import pytest

from megablocks_core.export.families import FAMILIES
from megablocks_core.export.quantising import Fp8, Fp8Blocks, Int4, Int8, Nvfp4
from megablocks_core.export.quantising.recipe import RECIPES, together_with

KEPT = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.block_sparse_moe.gate.weight",
    "model.layers.0.block_sparse_moe.router.layer.weight",
    "model.layers.0.mlp.shared_expert_gate.weight",
    "backbone.layers.0.mixer.conv1d.weight",
    "backbone.layers.0.mixer.x_proj.weight",
    "backbone.layers.0.mixer.dt_proj.weight",
    "model.layers.0.linear_attn.in_proj_ba.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "vision_model.model.layers.0.self_attn.q_proj.weight",
    "transformer.h.0.attn.c_attn.weight",
)
TAKEN = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.11.mlp.experts.3.down_proj.weight",
    "model.layers.1.block_sparse_moe.experts.0.w1.weight",
    "language_model.model.layers.0.self_attn.o_proj.weight",
    "backbone.layers.0.mixer.in_proj.weight",
    "model.layers.0.linear_attn.in_proj_qkvz.weight",
)


@pytest.mark.parametrize("recipe", [Fp8(), Fp8Blocks(), Nvfp4(), Int8(), Int4()])
def test_large_matrices_are_taken_and_nothing_else(recipe):
    assert not any(map(recipe.takes, KEPT)) and all(map(recipe.takes, TAKEN))
    assert type(recipe)() == recipe and recipe.algorithm


def test_every_family_with_attention_or_state_spaces_has_weights_that_are_taken():
    served = {
        name
        for name, family in FAMILIES.items()
        for weight in family.weights
        if Int8().takes(weight.name.replace("{}", "0"))
    }
    assert served == FAMILIES.keys() - {"gpt2"}


def test_patterns_add_and_take_away():
    recipe = Int8(exclude=("*.o_proj", "model.layers.0.*"), include=("lm_head", "*.o_proj"))
    assert recipe.takes("lm_head.weight")
    assert not recipe.takes("model.layers.1.self_attn.o_proj.weight")
    assert not recipe.takes("model.layers.0.self_attn.q_proj.weight")
    assert recipe.takes("model.layers.10.self_attn.q_proj.weight")


def test_what_is_multiplied_at_once():
    assert together_with("a.1.self_attn.k_proj.weight") == tuple(
        f"a.1.self_attn.{name}_proj.weight" for name in "qkv"
    )
    assert together_with("a.experts.7.w3.weight") == (
        "a.experts.7.w1.weight",
        "a.experts.7.w3.weight",
    )
    assert together_with("a.mlp.down_proj.weight") == ("a.mlp.down_proj.weight",)


def test_which_are_calibrated():
    calibrated = {name for name, recipe in RECIPES.items() if recipe().is_calibrated}
    assert calibrated == {"fp8", "nvfp4"}
    assert {name for name, recipe in RECIPES.items() if recipe().cache_algorithm} == calibrated
    assert Fp8(kv_cache=False).cache_algorithm is None


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Int4(group_size=0), "group_size=0 must be whole numbers above 0"),
        (lambda: Int4(group_size=True), "group_size=True"),
        (lambda: Fp8Blocks(block=(128, 0)), r"block=\(128, 0\) must be whole"),
        (lambda: Fp8Blocks(block=128), "block=128 must be a block's rows and columns"),  # type: ignore[arg-type]
        (lambda: Fp8(kv_cache="no"), "kv_cache='no' must be True or False"),  # type: ignore[arg-type]
        (lambda: Int8(exclude="*.o_proj"), "exclude='.*' must be a tuple of patterns"),  # type: ignore[arg-type]
        (lambda: Int8(include=(1,)), r"include=\(1,\) must be a tuple"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_recipe(made, message):
    with pytest.raises(ValueError, match=message):
        made()
