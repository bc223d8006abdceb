"""The three products have the rounded operands that recipes say, and gradients follow."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from megablocks_core.parallel import recompute
from megablocks_core.parallel.recipes.emulation import emulated_linear
from megablocks_core.parallel.recipes.recipe import (
    MXFP8,
    NVFP4,
    RECIPES,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
)
from megablocks_core.parallel.recipes.rounding import Chances, Rounding, amaxes_of
from megablocks_core.parallel.recipes.state import DelayedState, state_for
from megablocks_core.testing import ranks

ALL = [
    *(kind() for kind in RECIPES),
    CurrentScaling("e4m3", power_of_two_scales=True),
    BlockScaling("hybrid", squares="gradient"),
    MXFP8("hybrid", square_weights=True),
    NVFP4(hadamard=False, stochastic_rounding=False, square_weights=False),
]


def name_of(recipe):
    fields = [str(value) for value in vars(recipe).values()]
    return "-".join([type(recipe).__name__, *fields])


def operands(dtype=torch.float64, tokens=40, inputs=48, outputs=56):
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((2, tokens // 2, inputs), (outputs, inputs), (2, tokens // 2, outputs))
    )
    return x.requires_grad_(), weight.requires_grad_(), dy


def run(recipe, x, weight, dy, state=None):
    state = state_for(recipe) if state is None else state
    y = emulated_linear(x, weight, recipe=recipe, state=state)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), dy))


def told(recipe, operand, x):
    """The operand's rounding, by the plain functions; delayed scaling has scales of 1 at first."""
    amaxes = amaxes_of(x, recipe, operand)
    scales = torch.stack(amaxes) if amaxes else None
    if isinstance(recipe, DelayedScaling):
        scales = torch.ones(1)
    by_chance = isinstance(recipe, NVFP4) and recipe.stochastic_rounding
    chances = Chances(torch.tensor(0), torch.tensor(0)) if by_chance else None
    return Rounding(recipe, operand, scales, chances if operand == "gradient" else None)


@pytest.mark.parametrize("recipe", ALL, ids=name_of)
def test_each_product_has_its_two_rounded_operands(recipe):
    x, weight, dy = operands()
    y, dx, dweight = run(recipe, x, weight, dy)
    x, dy, weight = x.detach().flatten(0, 1), dy.flatten(0, 1), weight.detach()
    of_x, of_weight, of_dy = (
        told(recipe, name, value)
        for name, value in (("input", x), ("weight", weight), ("gradient", dy))
    )
    assert_close(y.flatten(0, 1), of_x.over_columns(x) @ of_weight.over_columns(weight).t())
    assert_close(dx.flatten(0, 1), of_dy.over_columns(dy) @ of_weight.over_rows(weight))
    assert_close(dweight, of_dy.over_rows(dy).t() @ of_x.over_rows(x))


@pytest.mark.parametrize("kind", [CurrentScaling, BlockScaling, MXFP8, NVFP4])
def test_backward_in_more_bits(kind):
    x, weight, dy = operands()
    plain = torch.autograd.grad(x @ weight.t(), (x, weight), dy)
    high = run(kind(backward="high_precision"), x, weight, dy)
    for found, expected in zip(high[1:], plain, strict=True):
        assert torch.equal(found, expected)
    y, dx, dweight = run(kind(backward="dequantized"), x, weight, dy)
    rows, dy = x.detach().flatten(0, 1), dy.flatten(0, 1)
    of_x, of_weight = told(kind(), "input", rows), told(kind(), "weight", weight.detach())
    assert torch.equal(y, high[0])
    assert_close(dx.flatten(0, 1), dy @ of_weight.over_columns(weight.detach()))
    assert_close(dweight, dy.t() @ of_x.over_columns(rows))


@pytest.mark.parametrize("recipe", ALL, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_near_those_of_more_bits(recipe, dtype):
    x, weight, dy = operands(dtype)
    plain = [x @ weight.t(), *torch.autograd.grad(x @ weight.t(), (x, weight), dy)]
    bound = 0.3 if isinstance(recipe, NVFP4) else 0.08
    for found, expected in zip(run(recipe, x, weight, dy), plain, strict=True):
        assert found.dtype == dtype
        assert (found - expected).norm() < bound * expected.norm()


@pytest.mark.parametrize("recipe", ALL, ids=name_of)
def test_no_tokens_have_gradients_of_zero(recipe):
    x, weight, dy = (
        torch.zeros(0, 48, requires_grad=True),
        operands()[1].float(),
        torch.zeros(0, 56),
    )
    y, dx, dweight = run(recipe, x, weight, dy)
    assert (y.shape, dx.shape) == ((0, 56), (0, 48))
    assert torch.equal(dweight, torch.zeros(56, 48))


def test_what_is_frozen_has_no_gradient():
    x, weight, dy = operands()
    y = emulated_linear(x.detach(), weight, recipe=MXFP8())
    assert torch.autograd.grad(y, weight, dy)[0].shape == weight.shape
    y = emulated_linear(x, weight.detach(), recipe=MXFP8())
    assert torch.autograd.grad(y, x, dy)[0].shape == x.shape


def test_autocast_decides_the_dtype_and_does_not_touch_the_products():
    x, weight, dy = operands(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = emulated_linear(x, weight, recipe=MXFP8())
    expected = emulated_linear(x.bfloat16(), weight.bfloat16(), recipe=MXFP8())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    assert torch.autograd.grad(y, weight, dy.bfloat16())[0].dtype == torch.float32


def test_delayed_scaling_steps_where_gradients_are_on_and_nowhere_else():
    recipe = DelayedScaling(amax_history_len=4)
    state = DelayedState(recipe)
    x, weight, dy = operands()
    with torch.no_grad():
        emulated_linear(x, weight, recipe=recipe, state=state)
    assert state.scale_fwd.tolist() == [1.0, 1.0, 1.0]
    run(recipe, x, weight, dy, state)
    amaxes = torch.stack([x.abs().amax(), weight.abs().amax()]).float()
    assert_close(state.scale_fwd[:2], 448 / amaxes)
    assert_close(state.scale_bwd[0], 57344 / dy.abs().amax().float())
    # The next step is rounded under these scales, whatever its own values are.
    y = run(recipe, 3 * x, weight, dy, state)[0]
    scales = 448 / amaxes
    rounded_x = Rounding(recipe, "input", scales[:1]).over_columns(3 * x.detach().flatten(0, 1))
    rounded_weight = Rounding(recipe, "weight", scales[1:]).over_columns(weight.detach())
    assert_close(y.flatten(0, 1), rounded_x @ rounded_weight.t())


@pytest.mark.parametrize("recipe", [DelayedScaling(), NVFP4()], ids=["delayed", "chance"])
def test_a_region_that_runs_again_counts_one_step(recipe):
    x, weight, dy = operands()
    states = [state_for(recipe) for _ in range(2)]
    for _ in range(3):
        plain = run(recipe, x, weight, dy, states[0])

        def call(x, weight, state=states[1]):
            return emulated_linear(x, weight, recipe=recipe, state=state)

        y = recompute(call, x, weight)
        again = (y.detach(), *torch.autograd.grad(y, (x, weight), dy))
        for first, second in zip(plain, again, strict=True):
            assert torch.equal(first, second)
        for first, second in zip(states[0].buffers(), states[1].buffers(), strict=True):
            assert torch.equal(first, second)


@ranks(2)
def test_the_amaxes_of_all_ranks_decide():
    """Two ranks with half of the tokens each round as one with all of them."""
    import torch.distributed as dist

    from megablocks_core.groups import Mesh

    group = Mesh(dp=2).group("dp")
    x, weight, dy = operands(tokens=64)
    x, dy = (value.detach().flatten(0, 1) for value in (x, dy))
    own = slice(32 * dist.get_rank(), 32 * dist.get_rank() + 32)
    for recipe in (CurrentScaling(), DelayedScaling(), NVFP4(stochastic_rounding=False)):
        states = [state_for(recipe), state_for(recipe)]
        for _ in range(2):
            whole = run(recipe, x.clone().requires_grad_(), weight, dy, states[0])
            part = x[own].clone().requires_grad_()
            y = emulated_linear(part, weight, recipe=recipe, state=states[1], amax_group=group)
            dx, dweight = torch.autograd.grad(y, (part, weight), dy[own])
            assert_close(y.detach(), whole[0][own])
            assert_close(dx, whole[1][own])
            assert_close(group.all_reduce(dweight), whole[2])
    alone = DelayedScaling(reduce_amax=False)
    state = DelayedState(alone)
    emulated_linear(x[own].requires_grad_(), weight, recipe=alone, state=state, amax_group=group)
    assert_close(state.scale_fwd[0], 448 / x[own].abs().amax().float())


def test_what_is_missing_is_named():
    x, weight, _ = operands()
    with pytest.raises(ValueError, match="recipe=None must be a recipe"):
        emulated_linear(x, weight, recipe=None)
    for recipe in (DelayedScaling(), NVFP4()):
        with pytest.raises(ValueError, match="state=None of .* must be a"):
            emulated_linear(x, weight, recipe=recipe)
    for numbers in (x.int(), x.bool(), x.to(torch.float8_e4m3fn)):
        with pytest.raises(ValueError, match="x.dtype=.* must be a floating-point dtype of at"):
            emulated_linear(numbers, weight, recipe=CurrentScaling())


def test_a_model_trains_on_few_bits():
    """Each recipe fits a small regression nearly as far as more bits do."""

    def final_loss(recipe):
        torch.manual_seed(0)
        layers = [nn.Linear(32, 64), nn.Linear(64, 8)]
        states = [state_for(recipe) if recipe else None for _ in layers]
        parameters = [p for layer in layers for p in layer.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=5e-3)
        x = torch.randn(64, 32)
        target = torch.sin(x @ torch.randn(32, 8))
        loss = torch.tensor(0.0)
        for _ in range(40):
            h = x
            for layer, state in zip(layers, states, strict=True):
                if recipe is None:
                    h = layer(h)
                else:
                    h = layer.bias + emulated_linear(h, layer.weight, recipe=recipe, state=state)
                h = torch.tanh(h) if layer is layers[0] else h
            loss = (h - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    plain = final_loss(None)
    assert plain < 0.3
    for kind in RECIPES:
        assert final_loss(kind()) < plain * (2 if kind is NVFP4 else 1.1)
