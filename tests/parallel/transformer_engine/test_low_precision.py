"""A module's recipe is data; only delayed scaling gives it buffers, kept while they fit."""

import pytest
import torch
from torch import nn

from megablocks_core.groups import LOCAL
from megablocks_core.parallel.recipes import CurrentScaling, DelayedScaling
from megablocks_core.parallel.transformer_engine.low_precision import LowPrecision
from megablocks_core.parallel.transformer_engine.scales import Scales


class Layer(LowPrecision):
    def _new_scales(self, length):
        return Scales(length)


def test_it_starts_without_a_recipe():
    layer = Layer()
    assert (layer.recipe, layer.scales, layer.amax_group) == (None, None, LOCAL)
    assert not list(layer.named_modules())[1:]


def test_scales_stay_while_their_length_does():
    layer = Layer()
    layer.recipe = DelayedScaling(amax_history_len=4)
    first = layer.scales
    assert first.length == 4
    layer.recipe = DelayedScaling(amax_history_len=4, margin=1)
    assert layer.scales is first
    layer.recipe = DelayedScaling(amax_history_len=5)
    assert layer.scales is not first and layer.scales.length == 5
    layer.recipe = CurrentScaling()
    assert layer.scales is None and not layer.state_dict()


def test_unread_scales_of_a_state_are_refused():
    layer = Layer()
    layer.recipe = DelayedScaling(amax_history_len=2)
    state = layer.state_dict()
    layer.recipe = None
    with pytest.raises(RuntimeError, match="Unexpected"):
        nn.Module.load_state_dict(layer, state)


def test_a_recipe_must_be_one():
    with pytest.raises(ValueError, match="recipe=torch.float16 must be a recipe"):
        Layer().recipe = torch.float16  # pyright: ignore[reportAttributeAccessIssue]
