"""What stands for a weight has the names, shapes and dtypes that are told of it."""

import pytest
import torch

from megablocks_core.export.lazies import lazy
from megablocks_core.export.quantising import Fp8, Fp8Blocks, Int4, Int8, Nvfp4
from megablocks_core.export.quantising.weights import (
    Amaxes,
    cache_scales,
    check_together,
    quantised,
    schema_of,
)
from megablocks_core.export.slabs import dtype_of
from tests.export.quantising.tiny_recipes import RECIPES

GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_is_made_is_what_is_told(recipe):
    weight = lazy(torch.ones(6, 32, dtype=torch.bfloat16), "BF16")
    made = quantised(recipe, GATE, weight, torch.bfloat16, Amaxes({GATE: 1.0}, {GATE: 2.0}))
    told = schema_of(recipe, GATE, (6, 32))
    assert made.keys() == told.keys()
    for name, (shape, dtype) in told.items():
        assert tuple(made[name].get_shape()) == shape == tuple(made[name][...].shape)
        assert dtype_of(made[name]) == (dtype or torch.bfloat16) == made[name][...].dtype


def test_names_of_each_format():
    module = GATE.removesuffix(".weight")
    names = {
        Fp8(): ["weight", "weight_scale", "input_scale"],
        Fp8Blocks(): ["weight", "weight_scale_inv"],
        Nvfp4(): ["weight", "weight_scale", "weight_scale_2", "input_scale"],
        Int8(): ["weight", "weight_scale"],
        Int4(group_size=32): ["weight", "weight_scale", "pre_quant_scale"],
    }
    for recipe, found in names.items():
        assert list(schema_of(recipe, GATE, (6, 32))) == [f"{module}.{name}" for name in found]


def test_weights_that_are_multiplied_at_once_share_the_second_scale():
    weight = lazy(torch.ones(2, 16), "F32")
    amaxes = Amaxes({GATE: 1.0, UP: 7.0}, {GATE: 2.0, UP: 3.0})
    both = [quantised(Nvfp4(), name, weight, torch.float32, amaxes) for name in (GATE, UP)]
    for name, amax in (("weight_scale_2", 7), ("input_scale", 3)):
        for weight_name, made in zip((GATE, UP), both, strict=True):
            key = weight_name.replace("weight", name)
            assert made[key][...] == torch.tensor(amax / 2688, dtype=torch.float32)
    expert = [name.replace("mlp", "mlp.experts.3") for name in (GATE, UP)]
    of_expert = Amaxes(dict(zip(expert, (1.0, 7.0), strict=True)), dict.fromkeys(expert, 1.0))
    for name in expert:
        made = quantised(Fp8(), name, weight, torch.float32, of_expert)
        assert made[f"{name}_scale"][...] == torch.tensor(7 / 448)
    own = quantised(Fp8(), GATE, weight, torch.float32, amaxes)
    assert own[f"{GATE}_scale"][...] == torch.tensor(1 / 448)
    assert own[GATE.replace("weight", "input_scale")][...] == torch.tensor(2 / 448)


def test_scales_of_the_cache_lie_with_what_makes_keys_and_values():
    names = ["a.q_proj.weight", "a.k_proj.weight", "a.k_proj.bias", "b.v_proj.weight"]
    assert cache_scales(names) == {
        "a.k_proj.k_scale": "a.k_proj.weight",
        "b.v_proj.v_scale": "b.v_proj.weight",
    }


@pytest.mark.parametrize(
    ("recipe", "shape", "message"),
    [
        (Nvfp4(), (4, 24), r"gate_proj.weight \[4, 24\] must have rows of whole groups of 16"),
        (Int4(group_size=32), (4, 48), "whole groups of 32 numbers for group_size=32; exclude="),
        (Int4(group_size=16), (5, 48), r"\[5, 48\] must have an even number of rows"),
    ],
)
def test_weights_that_are_not_of_whole_groups_are_named(recipe, shape, message):
    with pytest.raises(ValueError, match=message):
        schema_of(recipe, GATE, shape)


def test_weights_that_are_taken_in_part_are_named():
    shapes = {GATE: (4, 4), UP: (4, 4)}
    recipe = Int8(exclude=("*.up_proj",))
    check_together(recipe, shapes, shapes)
    check_together(recipe, {}, shapes)
    with pytest.raises(ValueError, match=f"{UP} beside {GATE}"):
        check_together(recipe, {GATE: (4, 4)}, shapes)
