"""Messages on the caller's memory do what they say, many at a time, late or not."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import LOCAL, Group
from megablocks_core.groups.buffers import (
    start_all_gather_,
    start_all_reduce_,
    start_reduce_scatter_,
)
from megablocks_core.testing import ranks


def _world():
    return Group.of(dist.group.WORLD)


def _numbers(group, length, dtype=torch.float32):
    return (torch.arange(length) % 7 + group.rank).to(dtype)


def _sum(group, length, dtype=torch.float32):
    numbers = (torch.arange(length) % 7).to(dtype)
    return numbers * group.size + sum(range(group.size))


def _many_in_flight(group):
    length = 12 * group.size
    handles, wholes, shares, gathered = [], [], [], []
    for _ in range(4):
        wholes.append(_numbers(group, length))
        handles.append(start_all_reduce_(wholes[-1], group=group))
        shares.append(torch.empty(12))
        handles.append(start_reduce_scatter_(shares[-1], _numbers(group, length), group=group))
        gathered.append(torch.empty(length))
        own = torch.full((12,), float(group.rank))
        handles.append(start_all_gather_(gathered[-1], own, group=group))
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
    expected = _sum(group, length)
    for whole, share, rows in zip(wholes, shares, gathered, strict=True):
        assert torch.equal(whole, expected)
        assert torch.equal(share, expected.chunk(group.size)[group.rank])
        assert torch.equal(rows, torch.arange(float(group.size)).repeat_interleave(12))


@ranks(1, 2, 4)
def test_many_messages_are_in_flight_at_a_time():
    _many_in_flight(_world())


@ranks(2, 4, backend="delayed")
def test_many_late_messages_are_in_flight_at_a_time():
    _many_in_flight(_world())


@ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_shares_may_lie_in_the_whole_and_be_wider(dtype):
    group = _world()
    length = 6 * group.size
    whole = _numbers(group, length, dtype)
    own = whole.chunk(group.size)[group.rank]
    start_reduce_scatter_(own, whole, group=group).wait()
    assert torch.equal(own, _sum(group, length, dtype).chunk(group.size)[group.rank])
    start_all_gather_(whole, own, group=group).wait()
    assert torch.equal(whole, _sum(group, length, dtype))

    # 256 + 1 is 256 in bfloat16: what arrives is widened before it is summed.
    wide = torch.empty(1)
    parts = torch.full((group.size,), 256.0 if group.rank == 0 else 1.0).bfloat16()
    start_reduce_scatter_(wide, parts, group=group).wait()
    assert wide.item() == 256 + group.size - 1


@ranks(2, 4)
def test_flags_are_combined_by_their_maximum():
    group = _world()
    flags = torch.tensor([group.rank == 1, 0, 1], dtype=torch.uint8)
    start_all_reduce_(flags, group=group, op="max").wait()
    assert flags.tolist() == [1, 0, 1]


@ranks(4)
def test_a_share_costs_no_all_reduce():
    group = _world()
    with CommDebugMode() as traffic:
        start_reduce_scatter_(torch.empty(2), torch.ones(8), group=group).wait()
    counts = {str(op): count for op, count in traffic.get_comm_counts().items() if count}
    assert list(counts.values()) == [1]
    assert "alltoall" in next(iter(counts))


def test_alone_nothing_is_sent():
    whole, own = torch.arange(3.0), torch.empty(3)
    start_all_reduce_(whole, group=LOCAL).wait()
    start_reduce_scatter_(own, whole, group=LOCAL).wait()
    assert own.tolist() == [0, 1, 2]
    start_all_gather_(whole, own + 1, group=LOCAL).wait()
    assert whole.tolist() == [1, 2, 3]
