"""Zero counts and finite checks are those of one process, however gradients are cut."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import LOCAL, Group, Mesh, ShardSpec, mark
from megablocks_core.parallel.gradients.counts import all_finite, count_zeros
from megablocks_core.testing import ranks
from tests.parallel import gradient_layouts


def _world():
    return Group.of(dist.group.WORLD)


@ranks(4)
@pytest.mark.parametrize("layout", gradient_layouts.LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout_has_the_zeros_of_one_process(layout):
    wholes = gradient_layouts.whole_gradients()
    count = count_zeros(layout(wholes))
    assert count.dtype == torch.int64
    assert count.item() == sum((whole == 0).sum().item() for whole in wholes.values())


@ranks(4)
@pytest.mark.parametrize("layout", gradient_layouts.LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout_tells_all_ranks_of_one_value(layout):
    wholes = gradient_layouts.whole_gradients()
    assert all_finite(layout(wholes))
    places = {"a": (9, 5), "b": (11, 2), "c": (4,), "e": (3, 1, 2)}
    values = [math.nan, math.inf, -math.inf, math.nan]
    for (name, at), value in zip(places.items(), values, strict=True):
        spoilt = {key: whole.clone() for key, whole in wholes.items()}
        spoilt[name][at] = value
        model = layout(spoilt)
        assert not all_finite(model)
        assert not all_finite(model, group=_world())


@ranks(4)
def test_one_message_tells_all_who_step_together():
    world = _world()
    model = gradient_layouts.zero(gradient_layouts.whole_gradients())
    with CommDebugMode() as traffic:
        assert all_finite(model, group=world)
    assert traffic.get_total_counts() == 1


@ranks(2)
def test_f_046_experts_of_all_ranks_are_counted():
    group = _world()
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in ("dense", "expert")})
    mark(model, "expert", ShardSpec(0, group), expert=True)
    for parameter in model.values():
        parameter.grad = torch.zeros(1)
    assert count_zeros(model).item() == 3


@ranks(2)
def test_stages_add_their_zeros_and_agree():
    pp = Mesh(pp=2).group("pp")
    model = nn.Linear(2, 2 + pp.rank, bias=False)
    model.weight.grad = torch.zeros_like(model.weight)
    assert count_zeros(model, pp=pp).item() == 10
    assert all_finite(model, group=pp)
    if pp.rank:
        model.weight.grad[0, 0] = math.nan
    assert not all_finite(model, group=pp)


def test_only_gradients_that_are_there_count():
    model = nn.Linear(2, 2)
    assert count_zeros(model).item() == 0
    assert all_finite(model)
    model.bias.grad = torch.zeros(2)
    assert count_zeros(model).item() == 2
    assert count_zeros([model.bias, model.bias]).item() == 2
    assert all_finite(model.bias)
    model.bias.requires_grad_(False)
    assert count_zeros(model).item() == 0


def test_what_is_no_group_is_refused():
    for call in (lambda: count_zeros([], pp=None), lambda: all_finite([], group="dp")):
        with pytest.raises(ValueError, match="must be a Group"):
            call()
    assert count_zeros([], pp=LOCAL).item() == 0
