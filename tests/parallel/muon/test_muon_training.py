"""Models that Muon trains end with the weights of one process, whatever wraps and cuts them."""

import pytest
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, Mesh, gather_whole
from megablocks_core.parallel import DataParallel, Muon, fully_shard
from megablocks_core.testing import ranks
from tests.parallel.sharded_training import built, train


def _world():
    return Group.of(dist.group.WORLD)


def _assert_equal_training(
    wrap, *, tokens, tp=LOCAL, ep=LOCAL, micros=1, reduction="mean", **options
):
    twin, net = built(tp=tp, ep=ep)
    net = wrap(net)
    rates = {"lr": 0.02, "adamw": {"lr": 0.01}}
    optimizer, peer = Muon(net, **rates, **options), Muon(twin, **rates)
    used = [group["algorithm"] for group in peer.param_groups if group["params"]]
    assert used == ["muon", "adamw"]
    train(net, optimizer, [tokens.rank], size=tokens.size, micros=micros, reduction=reduction)
    train(twin, peer, range(tokens.size), size=tokens.size, micros=micros, reduction=reduction)
    wanted = gather_whole(twin)
    for name, tensor in gather_whole(net).items():
        assert_close(tensor, wanted[name], rtol=0, atol=1e-10, msg=name)


@ranks(1, 2, 4)
@pytest.mark.parametrize("dealt", [False, True])
def test_five_steps_with_data_parallel(dealt):
    group = _world()
    options = {"group": group, "expert_group": group} if dealt else {}
    _assert_equal_training(
        lambda net: DataParallel(net, group=group, expert_group=group),
        tokens=group,
        micros=3,
        **options,
    )


@ranks(4)
@pytest.mark.parametrize("mode", ["gather", "duplicated", "distributed"])
def test_five_steps_with_tensor_and_data_parallel(mode):
    mesh = Mesh(tp=2, dp=2)
    group = mesh.group("dp")
    _assert_equal_training(
        lambda net: DataParallel(net, group=group, expert_group=group, reduction="sum"),
        tokens=group,
        tp=mesh.group("tp"),
        reduction="sum",
        mode=mode,
        group=group,
        expert_group=group,
    )


@ranks(4)
def test_five_steps_with_expert_parallel():
    mesh = Mesh(dp=4, ep=2)
    groups = {"group": mesh.group("dp"), "expert_group": mesh.expert.group("edp")}
    _assert_equal_training(
        lambda net: DataParallel(net, **groups),
        tokens=mesh.group("dp"),
        ep=mesh.expert.group("ep"),
        **groups,
    )


@ranks(2, 4)
def test_five_steps_with_fully_shard():
    group = _world()
    _assert_equal_training(
        lambda net: fully_shard(net, group=group, expert_group=group), tokens=group, micros=3
    )


@ranks(4)
@pytest.mark.parametrize("mode", ["gather", "duplicated", "distributed"])
def test_five_steps_with_tensor_parallel_and_fully_shard(mode):
    mesh = Mesh(tp=2, dp=2)
    group = mesh.group("dp")
    _assert_equal_training(
        lambda net: fully_shard(net, group=group, expert_group=group),
        tokens=group,
        tp=mesh.group("tp"),
        mode=mode,
    )


@ranks(4)
def test_five_steps_with_fully_shard_and_expert_parallel():
    mesh = Mesh(dp=4, ep=2)
    group, expert_group = mesh.group("dp"), mesh.expert.group("edp")
    _assert_equal_training(
        lambda net: fully_shard(net, group=group, expert_group=expert_group),
        tokens=group,
        ep=mesh.expert.group("ep"),
    )


@ranks(4)
def test_five_steps_with_hybrid_shards():
    group, replicate = Mesh(dp=4).split("dp", inner=2)
    _assert_equal_training(
        lambda net: fully_shard(net, group=group, expert_group=_world(), replicate=replicate),
        tokens=_world(),
    )
