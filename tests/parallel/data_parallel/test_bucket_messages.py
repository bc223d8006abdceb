"""One bucket's messages leave the sum where they say, late or not, and send what they say."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import LOCAL, Group, Mesh
from megablocks_core.parallel.data_parallel.bucket_messages import (
    ShardMessage,
    UsedFlags,
    WholeMessage,
)
from megablocks_core.testing import ranks

LENGTH = 24


def _world():
    return Group.of(dist.group.WORLD)


def _own(group):
    return torch.arange(float(LENGTH)) * 2**group.rank


def _sum(group):
    return torch.arange(float(LENGTH)) * (2**group.size - 1)


def _finished(message):
    message.go_on()
    message.finish()
    return message


@ranks(1, 2, 4)
@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float16])
def test_the_whole_sum(wire):
    group = _world()
    flat = _own(group)
    _finished(WholeMessage(flat, group=group, wire_dtype=wire))
    # These sums are whole numbers of at most nine bits; bfloat16 holds eight.
    assert torch.equal(flat, _sum(group) if wire is None else _sum(group).to(wire).float())


@ranks(4)
def test_sixteen_bits_on_the_wire_are_summed_in_float32():
    group = _world()
    flat = torch.full((4,), 256.0 if group.rank == 0 else 1.0)
    _finished(WholeMessage(flat, group=group, wire_dtype=torch.bfloat16))
    assert flat.tolist() == [260.0] * 4  # 259 in bfloat16; summed in it 256


@ranks(1, 2, 4)
def test_a_share_of_the_sum():
    group = _world()
    flat = _own(group)
    message = _finished(ShardMessage(flat, group=group))
    assert torch.equal(message.own, _sum(group).chunk(group.size)[group.rank])
    assert torch.equal(flat, _own(group)) or group.size == 1


def _replicated():
    mesh = Mesh(dp=4)
    group, replicate = mesh.split("dp", inner=2)
    message = _finished(ShardMessage(_own(_world()), group=group, replicate=replicate))
    assert torch.equal(message.own, _sum(_world()).chunk(2)[group.rank])
    flags = UsedFlags(
        {3: [False, True], 1: [_world().rank == 2]},
        group=group,
        replicate=replicate,
        device=torch.device("cpu"),
    )
    assert flags.of(1) == [True]
    assert flags.of(3) == [False, True]


@ranks(4)
def test_a_share_is_summed_over_copies_too():
    _replicated()


@ranks(4, backend="delayed")
def test_late_messages():
    _replicated()
    group = _world()
    flats = [_own(group) for _ in range(6)]
    messages = [
        WholeMessage(flat, group=group, wire_dtype=wire)
        for flat, wire in zip(flats, [None, torch.bfloat16] * 3, strict=True)
    ]
    for message in messages:
        message.go_on()
    for flat, message in zip(flats, messages, strict=True):
        message.finish()
        assert torch.allclose(flat, _sum(group), rtol=1e-2)


@ranks(2)
def test_what_is_sent():
    group = _world()
    for make, expected in {
        (lambda: WholeMessage(_own(group), group=group, wire_dtype=None)): {"allreduce": 1},
        (lambda: WholeMessage(_own(group), group=group, wire_dtype=torch.bfloat16)): {
            "alltoall_base": 1,
            "_allgather_base": 1,
        },
        (lambda: ShardMessage(_own(group), group=group)): {"alltoall_base": 1},
    }.items():
        with CommDebugMode() as traffic:
            _finished(make())
        counts = {str(op).split(".")[-1]: n for op, n in traffic.get_comm_counts().items() if n}
        assert sorted(name.strip("_") for name in counts) == sorted(
            name.strip("_") for name in expected
        )


def test_alone_own_flags_are_all():
    flags = UsedFlags({0: [True, False]}, group=LOCAL, device=torch.device("cpu"))
    assert flags.of(0) == [True, False]
    flags.wait()
