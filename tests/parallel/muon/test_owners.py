"""Whole tensors are dealt out evenly, and all ranks get the owners' values."""

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.muon import owners
from megablocks_core.testing import ranks


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 5))
def test_no_owner_has_more_than_its_part_and_one_thing(costs, num_owners):
    found = owners.owners_of(costs, num_owners)
    loads = [0] * num_owners
    for cost, owner in zip(costs, found, strict=True):
        loads[owner] += cost
    assert max(loads) <= sum(costs) / num_owners + max(costs, default=0)


def test_what_owners_have_already_counts():
    assert owners.owners_of([5, 3], 2, loads=[6, 0]) == [1, 1]
    assert owners.owners_of([5, 3], 2) == [0, 1]


@ranks(1, 2, 4)
def test_all_ranks_get_the_values_of_the_owners():
    group = Group.of(dist.group.WORLD)
    shapes = [(2, 3), (0, 4), (5,), (), (3, 1), (7,)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.int64] * 2
    mine = [
        torch.full(shape, 10 * index + group.rank).to(dtype)
        for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    ]
    places = [index % group.size for index in range(len(shapes))]
    with CommDebugMode() as traffic:
        owners.send_from_owners(mine, places, group=group)
    for index, (tensor, place) in enumerate(zip(mine, places, strict=True)):
        assert (tensor == 10 * index + place).all()
    assert traffic.get_total_counts() == (3 if group.size > 1 else 0)  # one for each dtype


@ranks(2)
def test_long_lists_travel_in_several_messages():
    group, limit = Group.of(dist.group.WORLD), owners._MESSAGE
    owners._MESSAGE = 8
    try:
        tensors = [torch.full((5,), float(10 * index + group.rank)) for index in range(6)]
        with CommDebugMode() as traffic:
            owners.send_from_owners(tensors, [0, 0, 0, 0, 1, 1], group=group)
    finally:
        owners._MESSAGE = limit
    assert traffic.get_total_counts() == 2
    for index, tensor in enumerate(tensors):
        assert (tensor == 10 * index + (index > 3)).all()


def test_alone_nothing_moves():
    tensor = torch.ones(2)
    owners.send_from_owners([tensor], [0], group=LOCAL)
    assert tensor.tolist() == [1, 1]
