"""Learning rates follow a schedule from the program's settings, never from a loaded state."""

import copy

import pytest
import torch
from torch import nn

from megablocks_core.train import Ramp, Scheduled, constant_schedule, linear_schedule


def two_groups(lr=0.1, **options):
    a, b = (nn.Parameter(torch.ones(3)) for _ in range(2))
    return torch.optim.AdamW(
        [{"params": [a]}, {"params": [b], "lr": 10 * lr}], lr=lr, weight_decay=0.5, **options
    )


def rates(optimizer, option="lr"):
    return [float(group[option]) for group in optimizer.param_groups]


def step(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_every_group_keeps_its_proportion():
    optimizer = two_groups()
    rate = Scheduled(optimizer, linear_schedule(10))
    for position, factor in ((0, 1.0), (5, 0.5), (2, 0.8), (10, 0.0), (0, 1.0)):
        assert rate.set(position) == factor
        assert rates(optimizer) == pytest.approx([0.1 * factor, 1.0 * factor])


def test_another_option_can_follow():
    optimizer = two_groups()
    Scheduled(optimizer, Ramp(4), option="weight_decay").set(1)
    assert rates(optimizer, "weight_decay") == [0.125, 0.125]
    assert rates(optimizer) == [0.1, 1.0]


def test_a_rate_that_is_a_tensor_is_changed_in_place():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.5), capturable=False)
    tensor = optimizer.param_groups[0]["lr"]
    Scheduled(optimizer, linear_schedule(4)).set(1)
    assert optimizer.param_groups[0]["lr"] is tensor and tensor.item() == 0.375


def test_state_from_the_start_is_no_step():
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.ones(3))], lr=0.5)
    assert optimizer.state
    assert Scheduled(optimizer, linear_schedule(4)).set(1) == 0.75
    step(optimizer)
    with pytest.raises(ValueError, match="base=None must be one value"):
        Scheduled(optimizer, linear_schedule(4))


def test_f_142_the_rate_after_a_resume_is_that_of_its_step():
    """At step 4 of 10 the rate is 0.4, with the optimizer's state loaded or not."""
    first = two_groups(lr=1.0)
    rate = Scheduled(first, constant_schedule(warmup=10))
    for position in range(1, 4):
        rate.set(position)
        step(first)
    for state in (first.state_dict(), None):
        resumed = two_groups(lr=1.0)
        rate = Scheduled(resumed, constant_schedule(warmup=10))
        if state is not None:
            resumed.load_state_dict(copy.deepcopy(state))
        rate.set(4)
        assert rates(resumed) == pytest.approx([0.4, 4.0])


def test_f_144_new_settings_count_whole_after_a_resume():
    """The old maximum, minimum and start leave no trace."""
    first = two_groups(lr=1e-3)
    rate = Scheduled(first, linear_schedule(100, end=0.5))
    rate.set(50)
    step(first)
    resumed = two_groups(lr=1e-4)
    rate = Scheduled(resumed, linear_schedule(200, end=0.1))
    resumed.load_state_dict(first.state_dict())
    rate.set(200)
    assert rates(resumed) == pytest.approx([1e-5, 1e-4])
    rate.set(0)
    assert rates(resumed) == pytest.approx([1e-4, 1e-3])


def test_an_optimizer_in_use_needs_its_base_values_said():
    optimizer = two_groups()
    step(optimizer)
    with pytest.raises(ValueError, match="base=None must be one value a parameter group"):
        Scheduled(optimizer, constant_schedule())
    with pytest.raises(ValueError, match="a value for each of 2 groups"):
        Scheduled(optimizer, constant_schedule(), base=[1.0])
    Scheduled(optimizer, linear_schedule(2), base=[4.0, 8.0]).set(1)
    assert rates(optimizer) == [2.0, 4.0]
    with pytest.raises(ValueError, match="option='rate' must be one of"):
        Scheduled(two_groups(), constant_schedule(), option="rate")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_base_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="base=.* must be finite: the lr of each group"):
        Scheduled(two_groups(), Ramp(4), base=[0.1, value])
    optimizer = two_groups()
    optimizer.param_groups[1]["lr"] = value
    with pytest.raises(ValueError, match="base=.* must be finite"):
        Scheduled(optimizer, Ramp(4))


def test_what_is_no_schedule_or_no_factor_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="schedule='cosine'"):
        Scheduled(optimizer, "cosine")  # type: ignore[arg-type]
    for factor in (float("nan"), -1.0, float("inf")):
        with pytest.raises(ValueError, match="factor of 0 or more"):
            Scheduled(optimizer, lambda _, factor=factor: factor).set(3)
    assert optimizer.param_groups[0]["lr"] == 0.1
