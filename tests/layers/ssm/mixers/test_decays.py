"""Rates and step sizes, and the values that they start with."""

import math

import pytest
import torch
from torch.nn.functional import softplus
from torch.testing import assert_close

from megablocks_core.layers.ssm.mixers.decays import (
    check_range,
    draw_log_rates_,
    draw_step_biases_,
    number_log_rates_,
    rates,
    step_sizes,
)


def test_rates_and_steps_are_float32_whatever_comes():
    A_log, dt, bias = torch.tensor([0.5]), torch.tensor([1.5]), torch.tensor([-2.0])
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        wide = torch.promote_types(dtype, torch.float32)
        found = rates(A_log.to(dtype)), step_sizes(dt.to(dtype), bias.to(dtype))
        assert [x.dtype for x in found] == [wide, wide]
        assert_close(found[0], torch.tensor([-math.exp(0.5)], dtype=wide))
        assert_close(found[1], softplus(torch.tensor([-0.5], dtype=wide)))


def test_steps_are_clamped():
    steps = step_sizes(torch.tensor([-9.0, 0.0, 9.0]), torch.zeros(3), (0.1, 2.0))
    assert_close(steps, torch.tensor([0.1, math.log(2), 2.0]))


def test_steps_are_drawn_log_uniform_and_not_below_the_smallest():
    biases = torch.empty(4000, dtype=torch.float64)
    draw_step_biases_(biases, key=1, bounds=(1e-3, 0.1))
    logs = softplus(biases).log()
    assert_close(logs.mean().item(), math.log(1e-2), rtol=0, atol=0.05)
    assert logs.min() >= math.log(1e-3) - 1e-9 and logs.max() <= math.log(0.1)
    draw_step_biases_(biases, key=1, bounds=(1e-9, 1e-8))
    assert_close(softplus(biases), torch.full_like(biases, 1e-4))


def test_rates_are_drawn_uniform_or_numbered():
    logs = torch.empty(4000, dtype=torch.float64)
    draw_log_rates_(logs, key=1, bounds=(1.0, 16.0))
    assert_close(logs.exp().mean().item(), 8.5, rtol=0, atol=0.3)
    numbered = torch.empty(3, 4)
    number_log_rates_(numbered)
    assert_close(numbered.exp(), torch.arange(1.0, 5.0).expand(3, 4))


def test_nothing_is_drawn_on_meta():
    for draw in (draw_log_rates_, draw_step_biases_):
        draw(torch.empty(3, device="meta"), key=1, bounds=(1.0, 2.0))
    number_log_rates_(torch.empty(3, 2, device="meta"))


@pytest.mark.parametrize("bounds", [(-1.0, 2.0), (3.0, 2.0), (math.nan, 2.0)])
def test_an_empty_range_raises(bounds):
    with pytest.raises(ValueError, match="limit="):
        check_range("limit", bounds, lowest=0.0)
