"""Recipes are plain data that cannot hold what no back end does."""

import dataclasses
import pickle

import pytest

from megablocks_core.parallel.recipes import MXFP8, NVFP4, BlockScaling, CurrentScaling
from megablocks_core.parallel.recipes.recipe import RECIPES, DelayedScaling, check_recipe


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_is_a_value(kind):
    recipe = kind()
    assert pickle.loads(pickle.dumps(recipe)) == recipe == kind()
    assert len({recipe, kind()}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.backward = "quantized"
    check_recipe("recipe", recipe)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (DelayedScaling, "format", "e5m2"),
        (DelayedScaling, "margin", -1),
        (DelayedScaling, "margin", 0.5),
        (DelayedScaling, "amax_history_len", 0),
        (DelayedScaling, "amax_algorithm", "min"),
        (DelayedScaling, "reduce_amax", 1),
        (CurrentScaling, "format", None),
        (CurrentScaling, "power_of_two_scales", "yes"),
        (CurrentScaling, "amax_epsilon", -1e-3),
        (CurrentScaling, "amax_epsilon", float("nan")),
        (CurrentScaling, "amax_epsilon", float("inf")),
        (CurrentScaling, "backward", "bf16"),
        (BlockScaling, "format", "E4M3"),
        (BlockScaling, "squares", "both"),
        (BlockScaling, "power_of_two_scales", 2),
        (BlockScaling, "amax_epsilon", True),
        (BlockScaling, "backward", None),
        (MXFP8, "format", "fp8"),
        (MXFP8, "square_weights", None),
        (MXFP8, "backward", ""),
        (NVFP4, "hadamard", 0),
        (NVFP4, "stochastic_rounding", "on"),
        (NVFP4, "square_weights", 16),
        (NVFP4, "backward", "fp8"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(kind, field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        kind(**{field: value})


@pytest.mark.parametrize("value", [None, "MXFP8", MXFP8, {"format": "e4m3"}])
def test_what_is_no_recipe_is_refused(value):
    with pytest.raises(ValueError, match="recipe=.*must be a recipe"):
        check_recipe("recipe", value)
