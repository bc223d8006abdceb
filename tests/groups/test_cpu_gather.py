"""All-gathers of CPU tensors may be in flight beside each other, eager and compiled."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import Group
from megablocks_core.groups.messages import (
    finish_all_gather,
    start_all_gather,
    start_all_reduce,
    wait,
)
from megablocks_core.testing import ranks


def _world():
    return Group.of(dist.group.WORLD)


def _start(x, group):
    return start_all_gather(x, dim=0, group=group, sizes=[len(x)] * group.size)


def _finish(flying, group):
    return finish_all_gather(flying, dim=0, sizes=[len(flying) // group.size] * group.size)


@ranks(2, 4)
def test_many_of_unequal_lengths_in_flight_at_once():
    group = _world()
    for step in range(50):
        lengths = [8 + index * 7 for index in range(5)]
        flying = [
            _start(torch.full((length,), 100.0 * step + length + group.rank / 8), group)
            for length in lengths
        ]
        total = start_all_reduce(torch.ones(3), group=group)
        for length, whole in zip(lengths, flying, strict=True):
            parts = [
                torch.full((length,), 100.0 * step + length + r / 8) for r in range(group.size)
            ]
            assert torch.equal(_finish(whole, group), torch.cat(parts))
        assert torch.equal(wait(total), torch.full((3,), float(group.size)))


@ranks(2)
def test_gloo_is_never_handed_a_list():
    group = _world()
    if dist.get_backend() != "gloo":
        pytest.skip("about gloo alone")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _finish(_start(torch.ones(3, 2), group), group)
        group.all_gather(torch.ones(group.rank + 1))
    sent = {event.key for event in profile.key_averages() if "gather" in event.key}
    assert any("_allgather_base" in name for name in sent)
    assert not any("coalesced" in name or "functional" in name for name in sent)


@ranks(2)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_every_dtype(dtype):
    group = _world()
    own = (torch.arange(4).view(2, 2) + group.rank).to(dtype)
    whole = torch.cat([(torch.arange(4).view(2, 2) + rank).to(dtype) for rank in range(2)])
    assert torch.equal(_finish(_start(own, group), group), whole)


@ranks(2)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_two_compiled_ones_in_flight(backend):
    """What is sent is what was there at the start: inductor may use that memory again."""
    group = _world()

    @torch.compile(fullgraph=True, backend=backend)
    def gathered(x):
        first, second = _start(x * 2, group), _start(x + 1, group)
        total = start_all_reduce(x * 3, group=group)
        y = x.sin() @ x.cos().t()
        return _finish(first, group), _finish(second, group), wait(total), y

    for step in range(3):
        parts = [torch.arange(12.0).view(3, 4) * (rank + 1) + step for rank in range(2)]
        x = parts[group.rank]
        first, second, total, y = gathered(x)
        assert_close(first, torch.cat([part * 2 for part in parts]))
        assert_close(second, torch.cat([part + 1 for part in parts]))
        assert_close(total, sum(part * 3 for part in parts))
        assert_close(y, x.sin() @ x.cos().t())
