"""Whatever is handed over in place of an argument is refused by name, and nothing is sent."""

import functools
import math

import torch
from torch import nn

from megablocks_core.groups import Mesh
from megablocks_core.parallel import ShardedOptimizer, StochasticRounding
from megablocks_core.testing import ranks
from tests.parallel import wrong_arguments as no

AdamW = torch.optim.AdamW
SEEDS = (StochasticRounding(seed) for seed in (None, "0", 1.5, True))
STATE = ("state", "param_groups", "ranges", "steps")


def _wrong(model):
    weight = model.weight
    params = (None, 3, "all", [3], [("weight", 3)], [("weight", weight), model.bias])
    groups = (3, "all", [3], [weight], [{}], {"params": [weight]})
    made = torch.optim.SGD(model.parameters())
    return {
        "module_or_parameters": (None, 3, "model", nn.Linear, weight, {"params": [weight]}, [{}]),
        "optimizer_class": (
            *(None, "AdamW", made, nn.Linear, functools.partial(AdamW, lr=1.0)),
            *(torch.optim.LBFGS, torch.optim.Adafactor),
        ),
        "group": no.NO_GROUPS,
        "expert_group": no.NO_GROUPS,
        "replicate": no.NO_GROUPS,
        "zero": (None, True, 0, 3, 1.0, "1", [1]),
        "reduction": no.NO_REDUCTIONS,
        "masters": (None, 1, "yes", torch.float32, StochasticRounding),
        "reduce_dtype": no.NO_DTYPES,
        "wire_dtype": (*no.NO_DTYPES, torch.float32),
        "overlap": no.NO_FLAGS,
        "offload": no.NO_FLAGS,
        "bucket_bytes": no.NO_COUNTS,
        "groups": groups,
    }, params


@ranks(1, 2)
def test_one_rank_is_refused_before_any_message():
    group, model = Mesh().group("dp"), nn.Linear(2, 2)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    right = {"module_or_parameters": model, "optimizer_class": AdamW, "group": group}
    if group.rank == 0:  # what it sent would find nobody
        wrong, params = _wrong(model)
        no.refused(ShardedOptimizer, right, wrong)
        no.each_refused(
            lambda x: ShardedOptimizer(model, AdamW, group=group, groups=[{"params": x}]),
            "params",
            params,
        )
        no.each_refused(
            lambda x: ShardedOptimizer(model, AdamW, group=group, masters=x), "seed", SEEDS
        )
        no.each_refused(
            lambda x: ShardedOptimizer(
                model, AdamW, group=group, groups=[{"params": [model.bias], "param_names": x}]
            ),
            "param_names",
            (3, ["a", "b"], [3]),
        )
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    optimizer = ShardedOptimizer(**right)
    if group.rank == 0:
        state = optimizer.state_dict()
        lacking = [{k: v for k, v in state.items() if k != name} for name in STATE]
        no.refused(optimizer.load_state_dict, {}, {"state_dict": (None, 3, [1], *lacking)})
        wrong = {
            "max_norm": (*no.NO_NUMBERS, -1.0),
            "norm_type": (*no.NO_NUMBERS, 0, -math.inf),
            "pp": no.NO_GROUPS,
        }
        no.refused(optimizer.clip_grad_norm_, {"max_norm": 1.0}, wrong)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
