"""Waiting is what a collective costs beyond arithmetic, on made-up events and on real ranks."""

import time

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.groups import Mesh, copy_to
from megablocks_core.testing import ranks
from megablocks_core.train.communication import (
    CommunicationSample,
    Event,
    Seen,
    seconds_exposed,
    split_events,
    what_was_seen,
)

spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda span: (span[0], sum(span))),
    max_size=8,
)


@given(communicating=spans, computing=spans)
def test_exposed_time_is_counted_nanosecond_by_nanosecond(communicating, computing):
    def inside(now, intervals):
        return any(start <= now < end for start, end in intervals)

    exposed = sum(inside(t, communicating) and not inside(t, computing) for t in range(100))
    assert seconds_exposed(communicating, computing) == exposed / 1e9


def test_on_cpu_gloo_waits_and_operators_of_the_watched_thread_compute():
    events = [
        Event("communication sample", 0, 100, 1, False),
        Event("gloo:all_reduce", 10, 50, 2, False),
        Event("c10d::allreduce_", 9, 12, 1, False),
        Event("_c10d_functional::wait_tensor", 20, 50, 1, False),
        Event("autograd::engine::evaluate_function: MulBackward0", 0, 90, 1, False),
        Event("aten::mm", 12, 20, 1, False),
        Event("aten::copy_", 15, 45, 2, False),  # by gloo's own thread
    ]
    assert split_events(events) == ([(10, 50)], [(12, 20)])
    assert what_was_seen(events) == Seen(32e-9, None)


def test_on_a_gpu_kernels_count_and_the_host_does_not():
    events = [
        Event("communication sample", 0, 100, 1, False),
        Event("communication sample", 0, 100, 0, True),
        Event("aten::mm", 0, 90, 1, False),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 50, 0, True),
        Event("sm90_gemm", 0, 30, 0, True),
    ]
    assert split_events(events) == ([(10, 50)], [(0, 30)])
    assert what_was_seen(events) == Seen(20e-9, 30e-9)


@ranks(2)
def test_the_fast_rank_waits_for_the_slow_one_and_not_the_reverse():
    group = Mesh().group("dp")
    group.barrier()
    sample = CommunicationSample()
    sample.start()
    if group.rank == 1:
        time.sleep(0.3)
    group.all_reduce(torch.ones(4))
    waited = sample.stop().waited
    assert waited > 0.25 if group.rank == 0 else waited < 0.15


@ranks(2)
def test_waits_of_backward_are_seen_and_hidden_ones_are_not():
    group = Mesh().group("dp")
    x = torch.ones(4, requires_grad=True)
    y = copy_to(x, group=group).sum()
    group.barrier()
    sample = CommunicationSample()
    sample.start()
    if group.rank == 1:
        time.sleep(0.3)
    y.backward()
    waited = sample.stop().waited
    assert waited > 0.25 if group.rank == 0 else waited < 0.15

    handle = dist.all_reduce(torch.ones(4), async_op=True) if group.rank == 0 else None
    sample = CommunicationSample()
    sample.start()
    a = torch.ones(300, 300)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        torch.mm(a, a)
    if group.rank == 1:
        dist.all_reduce(torch.ones(4))
    elif handle is not None:
        handle.wait()
    assert sample.stop().waited < 0.15


def test_nothing_is_left_on_the_error_stream(capfd):
    sample = CommunicationSample()
    sample.start()
    assert sample.stop() == Seen(0.0, None)
    assert capfd.readouterr().err == ""
