"""Buckets are sent in rank 0's order of the first backward, on all ranks."""

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import LOCAL, Group, Mesh
from megablocks_core.parallel.data_parallel.bucket_order import BucketOrder
from megablocks_core.parallel.data_parallel.buckets import Bucket, Slot
from megablocks_core.testing import ranks

APART = Group((7,))


def _buckets(*experts):
    device = torch.device("cpu")
    return [
        Bucket((Slot(index, 0, 1),), 1, 1, torch.float32, device, expert)
        for index, expert in enumerate(experts)
    ]


def test_the_first_backward_sends_at_its_end_in_the_order_of_the_plan():
    order = BucketOrder(_buckets(False, True, False), group=LOCAL, expert_group=APART)
    assert [order.complete(index) for index in (2, 0, 1)] == [[], [], []]
    assert order.rest() == [0, 2, 1]
    assert order.rest() == []


def test_later_ones_send_what_is_complete_in_the_known_order_each_kind_alone():
    order = BucketOrder(_buckets(False, True, False, True), group=LOCAL, expert_group=APART)
    for index in (3, 2, 0):  # 1 is never complete
        order.complete(index)
    order.agree()
    order.start()
    assert order.complete(0) == []
    assert order.complete(1) == []
    assert order.complete(3) == [3, 1]
    assert order.complete(2) == [2, 0]
    assert order.rest() == []
    order.start()
    assert order.complete(2) == [2]
    assert order.rest() == [0, 3, 1]


@pytest.mark.parametrize("shared", [{"group": APART}, {"group": LOCAL, "replicate": APART}])
def test_kinds_that_share_a_process_group_share_an_order(shared):
    order = BucketOrder(_buckets(False, True, False), expert_group=APART, **shared)
    for index in (1, 2, 0):
        order.complete(index)
    order.agree()
    order.start()
    assert [order.complete(index) for index in (0, 2, 1)] == [[], [], [1, 2, 0]]


@ranks(4)
def test_copies_share_the_order_too():
    group, replicate = Mesh(dp=4).split("dp", inner=2)
    order = BucketOrder(
        _buckets(False, False), group=group, expert_group=LOCAL, replicate=replicate
    )
    for index in ((1, 0), (0, 1), (0, 1), (0, 1))[dist.get_rank()]:
        order.complete(index)
    order.agree()
    order.start()
    assert order.rest() == [1, 0]


@ranks(2)
def test_all_ranks_follow_rank_0():
    group = Group.of(dist.group.WORLD)
    order = BucketOrder(_buckets(False, False, False), group=group, expert_group=LOCAL)
    for index in ((2, 0, 1), (0, 1))[group.rank]:
        order.complete(index)
    order.agree()
    order.start()
    assert order.rest() == [2, 0, 1]


@ranks(2)
def test_experts_that_are_copied_on_all_ranks_of_the_group_share_its_order():
    """A dense bucket that is idle on one rank must hold back its experts there, as elsewhere."""
    group = Group.of(dist.group.WORLD)
    order = BucketOrder(_buckets(False, True), group=group, expert_group=group)
    for index in (0, 1):
        order.complete(index)
    order.agree()
    order.start()
    assert order.complete(1) == []
    assert order.rest() == [0, 1]
