"""Whatever is handed over in place of an argument is refused by name, and nothing is changed."""

import math

import pytest
import torch
from torch import nn

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.parallel import (
    LossScaler,
    all_finite,
    clip_grad_norm_,
    count_zeros,
    reduce_gradients,
)
from megablocks_core.testing import ranks
from tests.parallel import wrong_arguments as no

GIVEN = {"module_or_parameters": no.NO_PARAMETERS}
FACTOR = (*no.NO_NUMBERS, -1.0, 0, math.inf)
SCALER = {
    "initial": (*FACTOR, 0.5, 2.0**33),
    "growth_factor": (*FACTOR, 0.5),
    "backoff_factor": (*FACTOR, 1.5),
    "growth_interval": no.NO_COUNTS,
    "hysteresis": no.NO_COUNTS,
    "minimum": FACTOR,
    "maximum": FACTOR,
    "group": no.NO_GROUPS,
}


def _refused(model, group, scaler):
    no.refused(
        reduce_gradients,
        {"module": model, "group": group},
        {
            "module": no.NO_MODULES,
            "group": no.NO_GROUPS,
            "expert_group": no.NO_GROUPS,
            "reduction": no.NO_REDUCTIONS,
        },
    )
    no.refused(
        clip_grad_norm_,
        {"module_or_parameters": model, "max_norm": 1.0, "pp": group},
        {
            **GIVEN,
            "max_norm": (*no.NO_NUMBERS, -1.0, -math.inf),
            "norm_type": (*no.NO_NUMBERS, "inf", -2.0, 0, -math.inf),
            "pp": no.NO_GROUPS,
        },
    )
    right = {"module_or_parameters": model}
    no.refused(count_zeros, {**right, "pp": group}, {**GIVEN, "pp": no.NO_GROUPS})
    no.refused(all_finite, {**right, "group": group}, {**GIVEN, "group": no.NO_GROUPS})
    no.refused(scaler.unscale_, {}, GIVEN)


@ranks(1, 2)
def test_gradients_stay_and_one_rank_is_refused_before_any_message():
    group, model = Mesh().group("dp"), nn.Linear(2, 2)
    scaler = LossScaler(group=group)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    if group.rank == 0:  # what it sent would find nobody
        _refused(model, group, scaler)
    reduce_gradients(model, group=group)
    assert all(parameter.grad.unique().tolist() == [3.0] for parameter in model.parameters())


def test_scalers():
    no.refused(LossScaler, {"group": LOCAL}, SCALER)
    scaler = LossScaler()
    no.refused(scaler.scale, {}, {"loss": (None, 1.0, [torch.ones(1)])})
    state = scaler.state_dict()
    for name in state:
        wrong = [{**state, name: value} for value in (None, "1", True, -1, math.nan, [1])]
        lacking = {key: value for key, value in state.items() if key != name}
        for value in (*wrong, lacking):
            with pytest.raises(ValueError, match=name):
                scaler.load_state_dict(value)
    no.refused(scaler.load_state_dict, {}, {"state": (None, 3, [1], "scale")})
    assert scaler.state_dict() == state


def test_what_is_right_is_taken():
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.tensor([3.0, 4.0])
    for given in (weight, [weight], (weight,), {weight}, iter([weight])):
        assert clip_grad_norm_(given, math.inf) == 5
    assert clip_grad_norm_(weight, 0) == 5 and count_zeros(weight) == 2
