"""Whatever is handed over in place of an argument is refused by name, and nothing is cut."""

import torch
from torch import nn

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.parallel import PrecisionPolicy, fully_shard, no_sync
from megablocks_core.testing import ranks
from tests.parallel import wrong_arguments as no

WRONG = {
    "module": no.NO_MODULES,
    "group": no.NO_GROUPS,
    "expert_group": no.NO_GROUPS,
    "replicate": no.NO_GROUPS,
    "reduction": no.NO_REDUCTIONS,
    "units": no.NO_PATTERNS,
    "reshard": (None, 1, "layers.*", ["0"], {3: True}, {"0": 1}),
    "precision": (torch.bfloat16, "bf16", PrecisionPolicy, {"params": torch.bfloat16}),
    "prefetch": no.NO_FLAGS,
    "offload": no.NO_FLAGS,
}


def _entered(module):
    with no_sync(module):
        pass


@ranks(1, 2)
def test_one_rank_is_refused_before_any_message():
    group, model = Mesh().group("dp"), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if group.rank == 0:  # what it sent would find nobody
        no.refused(fully_shard, {"module": model, "group": group}, WRONG)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    fully_shard(model, group=group, units=["0"])(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_policies_and_no_sync():
    wrong = {
        "params": no.NO_DTYPES,
        "reduce": (None, *no.NO_DTYPES),
        "keep_float32": (None, "router", *no.NO_PATTERNS),
        "cast_inputs": no.NO_FLAGS,
        "outputs": no.NO_DTYPES,
    }
    no.refused(PrecisionPolicy, {}, wrong)
    no.refused(_entered, {}, {"module": no.NO_MODULES})
    assert fully_shard(nn.Linear(2, 2), group=LOCAL, precision=PrecisionPolicy(params=None))
