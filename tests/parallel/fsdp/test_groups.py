"""What travels, over which ranks, in how many messages."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import LOCAL, Group, Mesh, gather_whole
from megablocks_core.parallel import PrecisionPolicy, fully_shard
from megablocks_core.parallel.fsdp.groups import _ExchangeAndSum, place_over
from megablocks_core.testing import ranks
from tests.traffic import Traffic


@ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exchange_and_a_sum_are_a_reduce_scatter(dtype):
    group = Group.of(dist.group.WORLD)
    whole = torch.arange(3.0 * group.size).mul(group.rank + 1).to(dtype)
    own = torch.empty(3, dtype=dtype)
    _ExchangeAndSum()(own, whole, group.pg, dist.ReduceOp.SUM)
    factor = group.size * (group.size + 1) / 2
    assert torch.equal(
        own, (torch.arange(3.0 * group.size) * factor).chunk(group.size)[group.rank].to(dtype)
    )


@ranks(4)
def test_shards_and_copies_must_cross():
    mesh = Mesh(dp=4)
    shards, copies = mesh.split("dp", inner=2)
    place = place_over(shards, copies, "cpu")
    assert place.mesh.mesh.mesh.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="replicate=.* must cross group="):
        place_over(shards, shards, "cpu")
    with pytest.raises(ValueError, match="replicate=.* needs a group of more than one rank"):
        fully_shard(nn.Linear(2, 2), group=LOCAL, replicate=copies)


@ranks(4)
def test_groups_that_were_closed_are_not_remembered():
    for _ in range(2):
        mesh = Mesh(tp=2, dp=2)
        group = mesh.group("dp")
        net: Any = fully_shard(nn.Linear(4, 4), group=group)
        for parameter in net.parameters():
            gradient: Any = torch.full_like(parameter, 1.0)
            parameter.grad = gradient
            assert gradient.device_mesh.get_group().group_name == group.name
        torch.optim.AdamW(net.parameters()).step()
        assert gather_whole(net)["weight"].shape == (4, 4)
        mesh.close()


def _net():
    net: Any = nn.Sequential()
    net.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
    net.head = nn.Linear(6, 6, bias=False)

    def forward(x):
        for layer in (*net.layers, net.head):
            x = layer(x)
        return x

    net.forward = forward
    return net


def _counts(net):
    for _ in range(2):
        with CommDebugMode() as traffic:
            net(torch.ones(1, 6)).sum().backward()
    return {str(op).rpartition(".")[2]: count for op, count in traffic.get_comm_counts().items()}


@ranks(2)
def test_messages_of_a_step():
    group = Mesh().group("dp")
    # The root's own weight is gathered once; the others' again in backward, if they were freed.
    for reshard, gathers in ((True, 4 + 3), (False, 4)):
        net: Any = fully_shard(_net(), group=group, reshard=reshard)
        messages = {"_allgather_base_": gathers, "all_to_all_single": 4, "all_reduce": 1}
        assert _counts(net) == messages


@ranks(2)
@pytest.mark.parametrize(("params", "itemsize"), [(None, 4), (torch.bfloat16, 2)])
def test_bytes_of_a_step(params, itemsize):
    """Gathers as parameters are used, and exchanges in float32; the root's is gathered once."""
    net: Any = fully_shard(
        _net(), group=Mesh().group("dp"), precision=PrecisionPolicy(params=params)
    )
    for _ in range(2):
        with Traffic() as traffic:
            net(torch.ones(1, 6)).sum().backward()
    assert traffic.bytes == {
        "all_gather": (4 + 3) * 36 * itemsize,
        "all_to_all": 4 * 36 * 4,
        "all_reduce": 4,  # which parameters were used
    }


@ranks(2)
def test_what_a_rank_holds_is_its_share():
    """Padded to equal slices: N ranks hold ceil(rows / N) rows each in memory."""
    group = Mesh().group("dp")
    net: Any = fully_shard(nn.Linear(8, 5), group=group)
    for parameter in net.parameters():
        local = parameter.to_local()
        row = parameter.numel() // 5 * parameter.itemsize
        assert local.shape[0] == (3, 2)[group.rank]
        assert local.untyped_storage().nbytes() == 3 * row
    net(torch.ones(1, 8)).sum().backward()
    optimizer: Any = torch.optim.AdamW(net.parameters())
    optimizer.step()
    for parameter in net.parameters():
        for tensor in (parameter.grad, *list(optimizer.state[parameter].values())[1:]):
            assert tensor.to_local().shape == parameter.to_local().shape
