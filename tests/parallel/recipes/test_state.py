"""Scales come from the steps before, counters go on, and both are plain tensors of a checkpoint."""

import io

import pytest
import torch
from torch import nn

from megablocks_core.parallel.recipes import (
    CurrentScaling,
    DelayedScaling,
    emulated_linear_factory,
)
from megablocks_core.parallel.recipes.recipe import NVFP4
from megablocks_core.parallel.recipes.state import DelayedState, DrawState, state_for


def steps(recipe, amaxes):
    """The scale of an input at each step."""
    state = DelayedState(recipe)
    return [state.step_forward(torch.tensor([[amax, 1.0]]))[0, 0].item() for amax in amaxes]


def test_a_step_uses_the_scale_of_the_one_before():
    recipe = DelayedScaling(amax_algorithm="most_recent")
    assert steps(recipe, [2.0, 4.0, 1.0, 7.0]) == [1.0, 224.0, 112.0, 448.0]


def test_the_largest_of_a_history_counts_until_it_leaves():
    recipe = DelayedScaling(amax_history_len=3)
    found = steps(recipe, [4.0, 2.0, 1.0, 1.0, 1.0])
    assert found == [1.0, 112.0, 112.0, 112.0, 224.0]
    assert steps(DelayedScaling(amax_history_len=1), [4.0, 2.0, 1.0]) == [1.0, 112.0, 224.0]


def test_margin_and_format():
    assert steps(DelayedScaling(margin=2), [1.0, 1.0]) == [1.0, 112.0]
    for name, largest in (("hybrid", 57344.0), ("e4m3", 448.0)):
        state = DelayedState(DelayedScaling(format=name))
        state.step_backward(torch.tensor([[1.0]]))
        assert state.step_backward(torch.tensor([[1.0]])) == largest


@pytest.mark.parametrize("amax", [0.0, torch.inf, torch.nan])
def test_a_step_without_a_finite_value_changes_no_scale(amax):
    recipe = DelayedScaling(amax_algorithm="most_recent")
    assert steps(recipe, [2.0, amax, 2.0]) == [1.0, 224.0, 224.0]


def test_names_and_shapes_are_those_of_transformer_engine():
    state = DelayedState(DelayedScaling(amax_history_len=5))
    assert {name: tuple(x.shape) for name, x in state.state_dict().items()} == {
        "scale_fwd": (3,),
        "amax_history_fwd": (5, 3),
        "scale_bwd": (2,),
        "amax_history_bwd": (5, 2),
    }
    for amax in (3.0, 9.0):
        state.step_forward(torch.tensor([[amax, 1.0]]))
    assert state.amax_history_fwd[:, 0].tolist() == [0.0, 0.0, 0.0, 3.0, 9.0]


def test_steps_go_on_from_a_checkpoint_bit_for_bit():
    recipe = DelayedScaling(amax_history_len=4)
    first, second = DelayedState(recipe), DelayedState(recipe)
    for amax in (3.0, 9.0, 2.0):
        first.step_forward(torch.tensor([[amax, amax]]))
        first.step_backward(torch.tensor([[amax]]))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    for amax in (1.0, 0.5, 7.0, 0.1):
        for state in (first, second):
            state.step_forward(torch.tensor([[amax, 2 * amax]]))
            state.step_backward(torch.tensor([[amax]]))
        assert all(
            torch.equal(a, b)
            for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
        )


@pytest.mark.parametrize("recipe", [DelayedScaling(), NVFP4()], ids=["delayed", "draws"])
def test_a_checkpoint_without_it_leaves_a_fresh_one(recipe):
    module = nn.Linear(2, 2)
    plain = module.state_dict()
    module.fp8 = state_for(recipe)
    fresh = {name: x.clone() for name, x in module.fp8.state_dict().items()}
    for buffer in module.fp8.buffers():
        buffer.fill_(7)
    module.load_state_dict(plain)
    after = module.fp8.state_dict()
    same = [torch.equal(after[name], x) for name, x in fresh.items() if name != "key"]
    assert all(same)
    with pytest.raises(RuntimeError, match="Missing key.*fp8.scale_bwd|Missing key.*fp8.key"):
        part = "scale_fwd" if isinstance(recipe, DelayedScaling) else "draws"
        module.load_state_dict({**plain, f"fp8.{part}": after[part]})


def test_a_checkpoint_with_it_is_refused_by_name_where_no_recipe_is():
    module = nn.Linear(2, 2)
    module.fp8 = state_for(DelayedScaling())
    with pytest.raises(RuntimeError, match="Unexpected key.*fp8.scale_fwd"):
        nn.Linear(2, 2).load_state_dict(module.state_dict())


def test_every_draw_has_a_number_of_its_own():
    state = DrawState()
    assert [int(state.draw()) for _ in range(3)] == [0, 1, 2]
    state.reset()
    assert int(state.draw()) == 0


def test_only_what_needs_a_state_has_one():
    assert state_for(None) is state_for(CurrentScaling()) is None
    assert state_for(NVFP4(stochastic_rounding=False)) is None
    assert isinstance(state_for(NVFP4()), DrawState)


def test_a_cast_of_the_layer_around_leaves_scales_and_draws_as_wide_as_they_are():
    layer = emulated_linear_factory(16, 16, parallel_mode="column")
    for recipe, dtypes in ((DelayedScaling(), {torch.float32}), (NVFP4(), {torch.int64})):
        layer.recipe = recipe
        layer.to(torch.bfloat16)
        assert {buffer.dtype for buffer in layer.get_submodule("fp8").buffers()} == dtypes
        assert layer.weight.dtype == torch.bfloat16
