"""Whatever is handed over in place of an argument is refused by name, and nothing is dealt out."""

import math

import torch
from torch import nn

from megablocks_core.parallel import Muon, NewtonSchulz
from tests.parallel import wrong_arguments as no

LEAST_0 = (*no.NO_NUMBERS, -1.0, math.inf)
SHARE = (*no.NO_NUMBERS, -0.1, 1.0)
BETAS = (None, 0.9, "ab", (0.9,), (0.9, 0.9, 0.9), *((0.9, value) for value in SHARE))


def test_muon():
    model = nn.Linear(3, 2)
    params = list(model.parameters())

    def groups(**options):
        return [{"params": params, **options}]

    wrong = {
        "module": no.NO_MODULES,
        "lr": (*LEAST_0, torch.ones(2)),
        "weight_decay": LEAST_0,
        "momentum": SHARE,
        "nesterov": no.NO_FLAGS,
        "adjust_lr": (None, "rms", 1, ["none"]),
        "newton_schulz": (None, 5, NewtonSchulz, {"steps": 5}),
        "adamw": (3, "adamw", [1], {"amsgrad": True}),
        "groups": (3, "all", [3], params, {"params": params}, [{}], [{"params": 3}]),
        "mode": (None, "blockwise", 1, ["gather"]),
        "group": no.NO_GROUPS,
        "expert_group": no.NO_GROUPS,
    }
    no.refused(Muon, {"module": model}, wrong)
    for name, values in {"lr": LEAST_0, "eps": LEAST_0, "betas": BETAS}.items():
        no.each_refused(lambda x, name=name: Muon(model, adamw={name: x}), name, values)
        no.each_refused(lambda x, name=name: Muon(model, groups=groups(**{name: x})), name, values)
    words = ("sgd", 3, ["muon"])
    no.each_refused(lambda x: Muon(model, groups=groups(algorithm=x)), "algorithm", words)
    optimizer = Muon(model, lr=torch.tensor(0.1), groups=iter(groups()))
    states = (None, 3, [1], {}, {"state": {}}, {"param_groups": []})
    no.refused(optimizer.load_state_dict, {}, {"state_dict": states})
    no.refused(optimizer.load_logical_values, {}, {"values": (None, 3, {})})


def test_newton_schulz():
    wrong = {
        "steps": (*no.NO_COUNTS, 100),
        "coefficients": (None, 3.0, "abc", (1.0, 2.0), *((1, 2, x) for x in no.NO_NUMBERS)),
        "eps": (*no.NO_NUMBERS, 0.0, -1.0, math.inf),
        "dtype": no.NO_DTYPES,
    }
    no.refused(NewtonSchulz, {}, wrong)
    x = (None, 3, [[1.0]], torch.ones(2), torch.ones(2, 2, dtype=torch.int64))
    no.refused(NewtonSchulz(), {}, {"x": x})
