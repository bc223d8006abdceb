"""A sharded model trains as one process does, whatever its parameters are and however they lie."""

import torch
from torch import nn

from megablocks_core.groups import Mesh
from megablocks_core.parallel import fully_shard
from megablocks_core.testing import ranks
from tests.parallel.fsdp_models import assert_equal_training


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


@ranks(1, 2, 4)
def test_five_steps_equal_one_process():
    group = Mesh().group("dp")
    for optimizer, micros, reduction in ((adamw, 1, "mean"), (sgd, 3, "sum")):
        assert_equal_training(
            lambda net, reduction=reduction: fully_shard(
                net, group=group, expert_group=group, reduction=reduction
            ),
            optimizer,
            group=group,
            micros=micros,
            reduction=reduction,
        )


@ranks(4)
def test_hybrid_shards_equal_one_process():
    mesh = Mesh(dp=4)
    group, replicate = mesh.split("dp", inner=2)
    ranks_of = {"group": group, "replicate": replicate, "expert_group": mesh.group("dp")}
    for reduction in ("mean", "sum"):
        assert_equal_training(
            lambda net, reduction=reduction: fully_shard(net, **ranks_of, reduction=reduction),
            adamw,
            group=group,
            rank=mesh.rank,
            size=4,
            micros=3,
            reduction=reduction,
        )


@ranks(4)
def test_slices_of_tensor_parallel_shares_equal_one_process():
    mesh = Mesh(tp=2, dp=2)
    group = mesh.group("dp")
    assert_equal_training(
        lambda net: fully_shard(net, group=group, expert_group=group),
        adamw,
        group=group,
        tp=mesh.group("tp"),
        micros=3,
    )


@ranks(2, 4)
def test_experts_lie_on_their_own_group_and_are_divided_as_dense_ones():
    mesh = Mesh(ep=2)
    group, experts = mesh.group("dp"), mesh.expert.group("edp")
    assert experts.size == mesh.world_size // 2
    for reduction in ("mean", "sum"):
        assert_equal_training(
            lambda net, reduction=reduction: fully_shard(
                net, group=group, expert_group=experts, reduction=reduction
            ),
            adamw,
            group=group,
            ep=mesh.expert.group("ep"),
            micros=3,
            reduction=reduction,
        )
