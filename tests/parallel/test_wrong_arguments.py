"""Whatever is handed over in place of an argument of a part of its own is refused by name."""

import math

import pytest
import torch
from torch import nn

from megablocks_core.parallel import MovingAverage
from megablocks_core.parallel.counter import key_of
from tests.parallel import wrong_arguments as no


def test_moving_averages():
    model = nn.Linear(2, 2)
    wrong = {
        "module": no.NO_MODULES,
        "decay": (*no.NO_NUMBERS, -0.1, 1.0, math.inf),
        "warmup": (*no.NO_NUMBERS, 0.5, -1.0, math.inf),
        "masters": (3, "adamw", torch.optim.SGD(model.parameters()), nn.Linear(2, 2)),
        "group": no.NO_GROUPS,
        "expert_group": no.NO_GROUPS,
    }
    no.refused(MovingAverage, {"module": model, "decay": 0.9}, wrong)
    average = MovingAverage(model, 0.9)
    no.refused(average.load_logical_values, {}, {"values": (None, 3, [1], {})})
    no.each_refused(lambda n: average.load_logical_values({"updates": n}), "updates", (-1, 1.5))
    average.update()
    assert average.logical_state().values == {"updates": 1}


def test_keys():
    wrong = {"seed": (None, "0", 1.5, True, torch.tensor(3)), "name": (None, 3, b"weight")}
    no.refused(key_of, {"seed": 0, "name": "weight"}, wrong)
    assert key_of(-1, "") != key_of(1, "")


def test_the_check_sees_what_it_looks_for():
    def careless(one, two=0):
        if one is None:
            raise ValueError("one=None must be there")
        if two is None:
            raise ValueError("something is wrong")

    no.refused(careless, {"one": 1}, {"one": (None,)}, besides=("two",))
    for wrong in ({"one": (None,)}, {"one": (3,), "two": ()}, {"one": (), "two": (None,)}):
        with pytest.raises(AssertionError):
            no.refused(careless, {"one": 1}, wrong)
