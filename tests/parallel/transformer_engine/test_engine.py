"""An engine is handed its parameters at a call, and holds none between calls."""

import pickle
from typing import Any
from unittest import mock

import pytest
import torch

from megablocks_core.parallel.initial import reset_parameters
from megablocks_core.parallel.recipes import CurrentScaling, DelayedScaling, autocast
from megablocks_core.parallel.recipes.transformer_engine import initialise
from megablocks_core.parallel.transformer_engine import grouped_linear, linear, norm_linear
from megablocks_core.parallel.transformer_engine.engine import Engine
from tests.parallel.transformer_engine.fake import fixture as fixture
from tests.parallel.transformer_engine.fake_quantization import FP8GlobalStateManager


def test_a_pickle_holds_no_module(te):
    engine = Engine("Linear", (4, 4), {"bias": False})
    copied = pickle.loads(pickle.dumps(engine))
    assert copied._module is None
    assert str(copied.module()) == str(engine.module())


def test_parameters_are_handed_back_after_an_error(te):
    engine = Engine("Linear", (4, 4), {"bias": False})
    with pytest.raises(RuntimeError):
        engine({"weight": torch.ones(4, 4)}, torch.ones(1, 3))
    assert engine.module().weight.is_meta


def born(build):
    torch.manual_seed(1)
    with initialise(CurrentScaling()):
        return build()


@pytest.mark.parametrize(
    "build", [lambda: linear(16, 8, parallel_mode="column"), lambda: norm_linear(16, 8)]
)
def test_weights_are_born_in_low_precision_with_the_values_of_ours(te, build):
    torch.manual_seed(1)
    wide = build()
    layer = born(build)
    assert type(layer.weight).__name__ == "QuantizedTensor"
    assert not layer.weight.is_meta and set(layer.state_dict()) == set(wide.state_dict())
    error = (layer.weight - wide.weight).abs().max() / wide.weight.abs().max()
    assert 0 < error < 2**-4
    x = torch.randn(4, 16)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    for each in (layer, wide):
        reset_parameters(each, seed=4)
    error = (layer.weight - wide.weight).abs().max() / wide.weight.abs().max()
    assert 0 < error < 2**-4
    torch.testing.assert_close(layer.bias, wide.bias, rtol=0, atol=0)


def test_what_cannot_be_born_so_is_refused(te):
    with pytest.raises(ValueError, match="device='meta' must be a real device"):
        born(lambda: linear(16, 8, parallel_mode="row", device="meta"))
    with pytest.raises(ValueError, match="stacked weights of experts cannot hold"):
        born(lambda: grouped_linear(2, 16, 16))


def test_one_module_a_step_moves_the_histories_of_backward_on(te):
    recipe = DelayedScaling(amax_history_len=4, amax_algorithm="most_recent")
    layers = torch.nn.Sequential(*(linear(16, 16, parallel_mode="column") for _ in range(3)))
    for layer in layers:
        layer.recipe = recipe
    x, steps = torch.randn(4, 16), 2
    with mock.patch.object(
        FP8GlobalStateManager,
        "reduce_and_update_fp8_tensors",
        wraps=FP8GlobalStateManager.reduce_and_update_fp8_tensors,
    ) as update:
        for _ in range(steps):
            with autocast(recipe):
                y = layers(x)
            y.square().sum().backward()
    moved = [call.kwargs["forward"] for call in update.call_args_list]
    assert moved.count(False) == steps
    layer: Any
    for layer in layers:
        # The newest step lies in the last row, behind it the one before.
        history = layer.scales.amax_history_bwd[:, 0]
        assert (history[-steps:] > 0).all() and not history[:-steps].any()


def test_a_module_that_is_not_rounded_is_not_the_first(te):
    recipe = DelayedScaling(amax_history_len=2)
    plain, layer = (linear(16, 16, parallel_mode="column") for _ in range(2))
    layer.recipe = recipe
    with autocast(recipe):
        y = layer(plain(torch.randn(4, 16)))
    y.sum().backward()
    assert layer.scales.amax_history_bwd[-1, 0] > 0
