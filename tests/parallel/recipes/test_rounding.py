"""Each recipe rounds each operand by its own rule, along what is summed over."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.numbers.formats import E4M3, E5M2
from megablocks_core.numbers.scaling import (
    amax_of,
    current_scale,
    round_blocks,
    round_mx,
    round_nvfp4,
    round_tensor,
    turned,
)
from megablocks_core.parallel.recipes.recipe import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
)
from megablocks_core.parallel.recipes.rounding import (
    Chances,
    Columns,
    Rounding,
    amaxes_of,
    block_length,
    turns,
)

X = torch.randn(130, 150, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 151)


def rounding(recipe, operand, **more):
    amaxes = amaxes_of(X, recipe, operand)
    return Rounding(recipe, operand, torch.stack(amaxes) if amaxes else None, **more)


def across(function, x):
    """Along the other dimension."""
    return function(x.t().contiguous()).values().t()


@pytest.mark.parametrize("operand", ["input", "weight", "gradient"])
def test_blocks_are_lines_or_one_operands_squares(operand):
    for squares in ("input", "weight", "gradient", "none"):
        rounds = rounding(BlockScaling(squares=squares), operand)
        if squares == operand:
            expected = round_blocks(X, E4M3, (128, 128)).values()
            assert torch.equal(rounds.over_columns(X), expected)
            assert torch.equal(rounds.over_rows(X), expected)
        else:
            lines = round_blocks(X, E4M3, (1, 128)).values()
            assert torch.equal(rounds.over_columns(X), lines)
            down = across(lambda x: round_blocks(x, E4M3, (1, 128)), X)
            assert torch.equal(rounds.over_rows(X), down)


@pytest.mark.parametrize("operand", ["input", "weight", "gradient"])
def test_mx_blocks(operand):
    to = E5M2 if operand == "gradient" else E4M3
    rounds = rounding(MXFP8("hybrid"), operand)
    assert torch.equal(rounds.over_columns(X), round_mx(X, to).values())
    assert torch.equal(rounds.over_rows(X), across(lambda x: round_mx(x, to), X))
    square = rounding(MXFP8("hybrid", square_weights=True), operand)
    block = (32, 32) if operand == "weight" else (1, 32)
    assert torch.equal(square.over_columns(X), round_mx(X, to, block).values())


@pytest.mark.parametrize("operand", ["input", "weight", "gradient"])
def test_one_scale_of_a_tensor_serves_both_products(operand):
    to = E5M2 if operand == "gradient" else E4M3
    recipe = CurrentScaling(power_of_two_scales=True, amax_epsilon=1e4)
    rounds = rounding(recipe, operand)
    scale = current_scale(torch.tensor(1e4), to, power_of_two=True)
    assert torch.equal(rounds.over_columns(X), round_tensor(X, to, scale).values())
    assert torch.equal(rounds.over_columns(X), rounds.over_rows(X))
    delayed = Rounding(DelayedScaling(), operand, torch.tensor([0.5]))
    assert torch.equal(delayed.over_rows(X), round_tensor(X, to, torch.tensor(0.5)).values())


def test_four_bits():
    weight = rounding(NVFP4(), "weight")
    square = round_nvfp4(X, (16, 16)).values()
    assert torch.equal(weight.over_columns(X), square)
    assert torch.equal(weight.over_rows(X), square)
    x = rounding(NVFP4(), "input")
    assert torch.equal(x.over_columns(X), round_nvfp4(X).values())
    assert torch.equal(x.over_rows(X), across(round_nvfp4, turned(X)))
    plain = rounding(NVFP4(hadamard=False, square_weights=False), "weight")
    assert torch.equal(plain.over_rows(X), across(round_nvfp4, X))


def test_the_amaxes_of_all_shares_decide():
    recipe = NVFP4(hadamard=False)
    larger = Rounding(recipe, "input", 4 * amax_of(X).reshape(1))
    assert torch.equal(larger.over_columns(X), round_nvfp4(X, amax=4 * amax_of(X)).values())


def test_chances_are_those_of_the_place_in_the_whole():
    key, draw = torch.tensor(5), torch.tensor(0)
    whole = Chances(key, draw).of(X, stream=0)
    assert whole.min() >= 0 and whole.max() < 1
    assert_close(whole.mean(), torch.tensor(0.5), rtol=0, atol=0.01)
    numbers = torch.tensor([3, 4, 90])
    part = Chances(key, draw, Columns(numbers, 150)).of(X[:, :3], stream=0)
    assert torch.equal(part, whole[:, numbers])
    others = [
        Chances(key, draw).of(X, stream=1),
        Chances(key, draw + 1).of(X, stream=0),
        Chances(key + 1, draw).of(X, stream=0),
    ]
    for other in others:
        assert (other == whole).float().mean() < 1e-3


def test_gradients_go_by_chance_and_are_right_on_average():
    recipe, x = NVFP4(hadamard=False), X[:32, :32]
    amaxes = torch.stack(amaxes_of(x, recipe, "gradient"))
    draws = [
        Rounding(recipe, "gradient", amaxes, Chances(torch.tensor(1), torch.tensor(draw)))
        for draw in range(200)
    ]
    nearest = (Rounding(recipe, "gradient", amaxes).over_columns(x) - x).norm()
    mean = torch.stack([rounds.over_columns(x) for rounds in draws]).mean(0)
    assert (mean - x).norm() < nearest / 4
    assert not torch.equal(draws[0].over_columns(x), draws[1].over_columns(x))


def test_what_is_asked_of_recipes():
    assert [block_length(kind()) for kind in (BlockScaling, MXFP8, NVFP4, CurrentScaling)] == [
        128,
        32,
        16,
        1,
    ]
    assert turns(NVFP4(), "input") and turns(NVFP4(), "gradient")
    assert not turns(NVFP4(), "weight") and not turns(NVFP4(hadamard=False), "input")
    assert amaxes_of(X, MXFP8(), "input") == amaxes_of(X, BlockScaling(), "weight") == []
    assert [len(amaxes_of(X, NVFP4(), name)) for name in ("input", "weight")] == [2, 1]
