"""A DTensor's placements say the same cuts as marks."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from megablocks_core.groups import own_slices
from megablocks_core.groups.placements import is_dtensor, local, placement_specs
from megablocks_core.parallel import clip_grad_norm_
from megablocks_core.testing import ranks
from tests.groups.strided import strided_layer

_PLACEMENTS = [
    ((Shard(0), Shard(0)), (13, 3)),
    ((Shard(0), Shard(1)), (13, 3)),
    ((Shard(-1), Replicate()), (2, 3)),
    ((_StridedShard(0, split_factor=2), Shard(0)), (12, 3)),
    ((Replicate(), Shard(0)), (1, 3)),
]


@ranks(4)
@pytest.mark.parametrize(("placements", "shape"), _PLACEMENTS, ids=str)
def test_they_say_what_a_rank_holds(placements, shape):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    tensor = distribute_tensor(whole, mesh, placements)
    assert is_dtensor(tensor)
    held, covered = local(tensor), 0
    for theirs, ours in own_slices(placement_specs(tensor), shape):
        assert torch.equal(held[ours], whole[theirs])
        covered += held[ours].numel()
    assert covered == held.numel()


@ranks(4)
def test_what_they_cannot_say_is_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unsummed = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])
    with pytest.raises(ValueError, match="must be shards and replicas"):
        placement_specs(unsummed)


@ranks(4)
@pytest.mark.parametrize("rows", [8, 6, 7, 5, 3, 13, 1])
def test_fsdp_over_tensor_parallel_cuts_unevenly(rows):
    """The strides of a strided shard differ in length, and some are empty."""
    whole, gradient = torch.arange(5.0 * rows).view(rows, 5), torch.randn(rows, 5)
    layer = strided_layer(whole)
    weight, covered = layer.weight, 0
    assert isinstance(weight, DTensor) and isinstance(weight.placements[0], _StridedShard)
    cuts = own_slices(placement_specs(weight), (rows, 5))
    share = torch.full_like(local(weight), torch.nan)
    for theirs, ours in cuts:
        assert torch.equal(local(weight)[ours], whole[theirs])
        share[ours] = gradient[theirs]
        covered += share[ours].numel()
    assert covered == share.numel()
    weight.grad = DTensor.from_local(
        share, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
    )
    norm = clip_grad_norm_(layer, 0.5)
    torch.testing.assert_close(norm, gradient.double().norm(), rtol=1e-12, atol=0)
    for theirs, ours in cuts:
        torch.testing.assert_close(
            local(weight.grad)[ours], gradient[theirs] * min(0.5 / (norm.float() + 1e-6), 1)
        )


def test_a_plain_tensor_is_not_cut():
    tensor = torch.ones(2)
    assert placement_specs(tensor) == ()
    assert local(tensor) is tensor
    assert not is_dtensor(tensor)
