"""Whatever is handed over in place of an argument is refused by name, and nothing is sent."""

import torch
from torch import nn

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.parallel import DataParallel
from megablocks_core.testing import ranks
from tests.parallel import wrong_arguments as no

WRONG = {
    "module": no.NO_MODULES,
    "group": no.NO_GROUPS,
    "expert_group": no.NO_GROUPS,
    "reduction": no.NO_REDUCTIONS,
    "reduce_dtype": no.NO_DTYPES,
    "wire_dtype": (*no.NO_DTYPES, torch.float32, torch.float64),
    "bucket_bytes": no.NO_COUNTS,
    "wide_gradients": no.NO_FLAGS,
}


def test_alone():
    no.refused(DataParallel, {"module": nn.Linear(2, 2), "group": LOCAL}, WRONG)


@ranks(2)
def test_one_rank_is_refused_before_any_message():
    group, model = Mesh(dp=2).group("dp"), nn.Linear(2, 2)
    if group.rank == 0:  # what it sent would find nobody
        no.refused(DataParallel, {"module": model, "group": group}, WRONG)
    DataParallel(model, group=group)(torch.ones(1, 2)).sum().backward()
    assert model.bias.grad is not None
