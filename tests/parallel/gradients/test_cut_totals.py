"""Numbers of parts add up to those of the whole, each group asked once."""

import math

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import LOCAL, Group, Mesh
from megablocks_core.parallel.gradients.cut_totals import total_over_cuts
from megablocks_core.testing import ranks


@ranks(4)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_each_part_is_combined_over_its_own_groups(op):
    mesh = Mesh(tp=2, dp=2)
    tp, dp = mesh.group("tp"), mesh.group("dp")
    combine = sum if op == "sum" else max
    own = torch.tensor(float(10 * tp.rank + dp.rank), dtype=torch.float64)
    parts = [((tp,), own), ((dp,), own), ((tp, dp), own), ((), torch.tensor(7.0)), ((dp,), None)]
    with CommDebugMode() as traffic:
        total = total_over_cuts(parts, torch.zeros((), dtype=torch.float64), op=op)
    assert traffic.get_total_counts() == 2
    by_tp = combine([dp.rank, 10 + dp.rank])
    by_dp = combine([10 * tp.rank, 10 * tp.rank + 1])
    assert total.item() == combine([by_tp, by_dp, combine([0, 1, 10, 11]), 7])


@ranks(2)
def test_groups_of_equal_ranks_are_asked_as_one():
    import torch.distributed as dist

    groups = [Group.of(dist.new_group([0, 1])) for _ in range(2)]
    parts = [((group,), torch.ones(())) for group in groups]
    with CommDebugMode() as traffic:
        total = total_over_cuts(parts, torch.zeros(()), op="sum")
    assert traffic.get_total_counts() == 1
    assert total.item() == 4


@ranks(2)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_nan_on_one_rank_is_nan_on_all(op):
    group = Mesh(tp=2).group("tp")
    own = torch.tensor(math.nan if group.rank else 1.0)
    assert total_over_cuts([((group,), own)], torch.zeros(()), op=op).isnan()
    assert total_over_cuts([((), own)], torch.zeros(()), group, op=op).isnan()


def test_nothing_is_the_zero():
    assert total_over_cuts([], torch.zeros((), dtype=torch.int64), LOCAL, op="sum").item() == 0
