"""Ranks count every element of a cut tensor once between them."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megablocks_core.groups import LOCAL, Group, Mesh, Segment, ShardSpec, load_slices
from megablocks_core.groups.shares import share_of
from megablocks_core.testing import ranks


def held(shape, specs, dtype=torch.int64):
    """This rank's part of a tensor whose elements are their places."""
    whole = torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)
    tensor = torch.empty([len(range(*_bounds(shape, dim, specs))) for dim in range(len(shape))])
    tensor = tensor.to(dtype)
    load_slices(tensor, specs, whole)
    return tensor


def _bounds(shape, dim, specs):
    length = shape[dim]
    for spec in specs:
        if spec.dim == dim:
            length = sum(part.stop - part.start for part in spec.ranges(length))
    return 0, length


def counted_by_all(tensor, specs, group):
    share = share_of(tensor, specs)
    places = share.of(tensor).flatten()
    return torch.cat(group.all_gather(places)).sort().values.tolist(), share


@ranks(1, 2, 4)
def test_each_element_counts_once_whatever_neighbours_hold():
    group = Group.of(dist.group.WORLD)
    packed = (Segment(8), Segment(4, parts=min(2, group.size)), Segment(3, parts=1))
    specs = (ShardSpec(0, group, packed),)
    places, share = counted_by_all(held((15, 3), specs), specs, group)
    assert places == list(range(45))
    assert share.num_cuts == group.size
    assert share.groups == ((group,) if group.size > 1 else ())


@ranks(4)
def test_a_cut_within_a_cut():
    mesh = Mesh(tp=2, dp=2)
    specs = (
        ShardSpec(0, mesh.group("tp"), (Segment(6), Segment(5, parts=1))),
        ShardSpec(0, mesh.group("dp"), (Segment(8),)),
    )
    places, share = counted_by_all(held((11, 2), specs), specs, mesh.group("tp", "dp"))
    assert places == list(range(22)) and share.num_cuts == 4


@ranks(4)
def test_a_dtensor_within_a_cut():
    mesh = Mesh(tp=2, dp=2)
    specs = (ShardSpec(0, mesh.group("tp"), (Segment(6), Segment(5, parts=1))),)
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dim in (0, 1):
        tensor = distribute_tensor(held((11, 2), specs), devices["dp"], [Shard(dim)])
        places, share = counted_by_all(tensor, specs, mesh.group("tp", "dp"))
        assert places == list(range(22)) and share.num_cuts == 4


def test_a_whole_tensor_is_one_share():
    tensor = torch.ones(3)
    share = share_of(tensor, (ShardSpec(0, LOCAL),))
    assert share.groups == () and share.num_cuts == 1 and share.of(tensor) is tensor
