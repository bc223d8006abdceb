"""Cut matrices come together on their owners or on all, and are cut again as they were."""

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import Group, Segment, ShardSpec, own_slices
from megablocks_core.parallel.muon.matrix_exchange import (
    Cut,
    divide_from_owners,
    join_on_all,
    join_on_owners,
)
from megablocks_core.testing import ranks


def _matrices(group):
    """Whole matrices and their cuts: even, uneven, with nothing on some ranks, with copies."""
    copies = (Segment(4), Segment(2, parts=1))
    specs = [
        ShardSpec(0, group),
        ShardSpec(1, group, (Segment(5),)),
        ShardSpec(0, group, (Segment(1),)),
        ShardSpec(0, group, copies),
    ]
    shapes = [(4, 3), (2, 5), (1, 3), (6, 2)]
    wholes = [torch.randn(shape) for shape in shapes]
    return wholes, [Cut(spec, shape) for spec, shape in zip(specs, shapes, strict=True)]


def _share(cut, whole):
    share = torch.empty(cut.shape_on(cut.spec.group.rank))
    for theirs, ours in own_slices((cut.spec,), cut.shape):
        share[ours] = whole[theirs]
    return share


@ranks(2, 4)
def test_all_ranks_have_the_wholes():
    group = Group.of(dist.group.WORLD)
    wholes, cuts = _matrices(group)
    shares = [_share(cut, whole) for cut, whole in zip(cuts, wholes, strict=True)]
    for joined, whole, cut, share in zip(
        join_on_all(shares, cuts, group=group), wholes, cuts, shares, strict=True
    ):
        assert torch.equal(joined, whole)
        assert torch.equal(cut.share_of(joined, group.rank), share)


@ranks(2, 4)
@pytest.mark.parametrize("first", [0, 1])
def test_owners_have_the_wholes_and_give_shares_back(first):
    group = Group.of(dist.group.WORLD)
    wholes, cuts = _matrices(group)
    shares = [_share(cut, whole) for cut, whole in zip(cuts, wholes, strict=True)]
    owners = [first, 1 - first, first, first]  # of four ranks, two own nothing
    joined = join_on_owners(shares, cuts, owners, group=group)
    mine = [index for index, owner in enumerate(owners) if owner == group.rank]
    assert len(joined) == len(mine)
    for index, whole in zip(mine, joined, strict=True):
        assert torch.equal(whole, wholes[index])
    doubled = [2 * whole for whole in joined]
    back = divide_from_owners(doubled, cuts, owners, like=shares[0], group=group)
    for share, result in zip(shares, back, strict=True):
        assert torch.equal(result, 2 * share)
