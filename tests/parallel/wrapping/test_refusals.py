"""A second wrapper, and experts whose copies nobody would sum, are refused by name."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import LOCAL, Group, Mesh, ShardSpec, mark, marks
from megablocks_core.parallel import DataParallel, ShardedOptimizer, fully_shard, reduce_gradients
from megablocks_core.parallel.wrapping.refusals import check_experts, refuse_wrapped
from megablocks_core.testing import ranks


def _expert(*cuts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    mark(model[0], "weight", *(ShardSpec(dim, cut) for dim, cut in enumerate(cuts)), expert=True)
    return model


def test_a_wrapper_is_found_where_it_stands():
    refuse_wrapped(_expert())
    with pytest.raises(ValueError, match="module=<built-in function len> must be a module"):
        DataParallel(len, group=LOCAL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be wrapped twice: 0 is a DataParallel"):
        refuse_wrapped(nn.Sequential(nn.DataParallel(_expert())))


ALL = Group((0, 1, 2, 3))
ONE, TWO, FAR = Group((0, 1)), Group((0, 2)), Group((0, 3))


@pytest.mark.parametrize(
    ("cuts", "groups"),
    [
        ((), {"group": LOCAL}),
        ((), {"group": ALL, "expert_group": ALL}),
        ((), {"group": ALL, "expert_group": TWO}),  # others on each rank, known to the caller
        ((ALL,), {"group": ALL}),
        ((ALL,), {"group": ONE, "replicate": TWO}),
        ((ONE, TWO), {"group": ALL}),  # etp and ep
        ((ONE, FAR), {"group": ALL}),  # the same over a device mesh in another order
        ((ONE,), {"group": ALL, "expert_group": TWO}),
        ((ONE,), {"group": TWO, "expert_group": TWO}),  # ep over the ranks of tp
    ],
)
def test_experts_that_are_cut_or_summed_over_all_ranks_pass(cuts, groups):
    check_experts(marks(_expert(*cuts)), **{"expert_group": LOCAL, **groups})


@pytest.mark.parametrize(
    ("cuts", "groups"),
    [
        ((), {"group": ONE}),
        ((ONE,), {"group": ALL}),
        ((ONE,), {"group": TWO}),
        ((ONE,), {"group": ONE, "replicate": TWO}),
        ((ONE,), {"group": ALL, "expert_group": ONE}),
    ],
)
def test_copies_that_nobody_sums_are_named(cuts, groups):
    with pytest.raises(ValueError, match=r"expert_group=.* must be the ranks .* '0\.weight'"):
        check_experts(marks(_expert(*cuts)), **{"expert_group": LOCAL, **groups})


@ranks(2)
def test_all_wrappers_keep_the_rule():
    group = Group.of(dist.group.WORLD)
    words = r"expert_group=LOCAL must be the ranks that share parameter '0\.weight'"
    for wrap in (
        DataParallel,
        fully_shard,
        reduce_gradients,
        lambda model, group: ShardedOptimizer(model, torch.optim.SGD, group=group, lr=0.1),
    ):
        with pytest.raises(ValueError, match=words):
            wrap(_expert(), group=group)
        wrap(_expert(group), group=group)


@ranks(4)
def test_copies_of_shards_must_cross_the_group():
    mesh = Mesh(dp=4)
    group, replicate = mesh.split("dp", inner=2)
    model = nn.Linear(2, 2)
    for wrong in (group, mesh.group("dp")):
        with pytest.raises(ValueError, match=r"replicate=.* must cross group=.* in this rank"):
            ShardedOptimizer(model, torch.optim.SGD, group=group, replicate=wrong, lr=0.1)
    torch.manual_seed(0)
    ShardedOptimizer(nn.Linear(2, 2), torch.optim.SGD, group=group, replicate=replicate, lr=0.1)
