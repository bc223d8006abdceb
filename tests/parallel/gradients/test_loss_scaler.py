"""The loss scale moves as torch's does, alike on all ranks, and gradients are unscaled anywhere."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import Group
from megablocks_core.parallel.gradients.loss_scaler import LossScaler
from megablocks_core.testing import ranks
from tests.parallel import gradient_layouts


def test_the_scale_is_torchs_and_so_are_the_steps_that_are_taken():
    model, twin = nn.Linear(3, 1), nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    options = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    ours = LossScaler(initial=1024.0, minimum=1e-9, **options)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    for step in range(20):
        x = torch.full((2, 3), math.inf if step in (2, 6, 7, 15) else 0.1 * step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        ours.scale(model(x).sum()).backward()
        if ours.unscale_(model):
            optimizers[0].step()
        theirs.scale(twin(x).sum()).backward()
        theirs.step(optimizers[1])
        theirs.update()
        assert ours.value == theirs.get_scale()
        assert torch.equal(model.weight, twin.weight)
    assert ours.skipped == 4


def _step(scaler, *, sound):
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([1.0 if sound else math.nan])
    return scaler.unscale_([weight])


def test_hysteresis_tolerates_until_the_scale_has_grown():
    scaler = LossScaler(initial=16.0, growth_interval=2, hysteresis=2)
    scales = []
    for sound in (False, True, False, False, True, True, False, False):
        assert _step(scaler, sound=sound) == sound
        scales.append(scaler.value)
    assert scales == [16, 16, 8, 4, 4, 8, 8, 4]


def test_the_scale_stays_within_its_bounds():
    scaler = LossScaler(initial=4.0, growth_interval=1, minimum=2.0, maximum=8.0)
    scales = [
        (_step(scaler, sound=sound), scaler.value)[1] for sound in (True, True, False, False, False)
    ]
    assert scales == [8, 8, 4, 2, 2]


@ranks(4)
@pytest.mark.parametrize("layout", gradient_layouts.LAYOUTS, ids=lambda layout: layout.__name__)
def test_gradients_of_every_layout_are_unscaled(layout):
    wholes = gradient_layouts.whole_gradients()
    model, scaled = layout(wholes), layout({name: 8 * x for name, x in wholes.items()})
    assert LossScaler(initial=8.0, group=Group.of(dist.group.WORLD)).unscale_(scaled)
    expected = gradient_layouts.held_gradients(model)
    for name, held in gradient_layouts.held_gradients(scaled).items():
        assert torch.equal(held, expected[name])


@ranks(2)
def test_one_rank_makes_all_skip():
    group = Group.of(dist.group.WORLD)
    scaler = LossScaler(initial=8.0, group=group)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([8.0, math.inf if group.rank else 8.0])
    assert not scaler.unscale_(weight)
    assert (scaler.value, scaler.skipped) == (4.0, 1)
    assert weight.grad[0] == 8.0


def test_state_is_json_and_goes_on():
    scaler = LossScaler(initial=16.0, growth_interval=3, hysteresis=2)
    for sound in (True, False, True, True):
        _step(scaler, sound=sound)
    again = LossScaler(growth_interval=3, hysteresis=2)
    again.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    for sound in (True, False, False):
        _step(scaler, sound=sound)
        _step(again, sound=sound)
        assert again.state_dict() == scaler.state_dict()
    with pytest.raises(ValueError, match=r"must have \['tolerated'\]"):
        again.load_state_dict({"scale": 1.0, "good_steps": 0, "skipped": 0})
    assert again.state_dict() == scaler.state_dict()


def test_a_16_bit_loss_is_scaled_in_float32():
    scaler = LossScaler(initial=2.0**20)
    scaled = scaler.scale(torch.tensor(2.0, dtype=torch.float16))
    assert scaled.dtype == torch.float32 and scaled.item() == 2.0**21
    assert scaler.scale(torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float64
