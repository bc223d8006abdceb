"""A trace of a step: gradients travel while backward goes on, weights while forward has begun."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import Group
from megablocks_core.groups import buffers as messages
from megablocks_core.parallel import ShardedOptimizer
from megablocks_core.parallel.data_parallel import bucket_messages
from megablocks_core.parallel.sharded_optimizer import flat_parameters
from megablocks_core.testing import ranks

LAYERS, LAYER, MESSAGE = 6, 0.02, 0.015  # seconds of a layer, each way, and of a message


class _Slow(torch.autograd.Function):
    """What a layer computes before it reads its weights, and after their gradients are there."""

    @staticmethod
    def forward(ctx, x, trace):
        ctx.trace = trace
        time.sleep(LAYER)
        trace.append("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(LAYER)
        ctx.trace.append("backward")
        return gradient, None


class _Net(nn.Module):
    def __init__(self, trace):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(LAYERS)])
        self.trace = trace

    def forward(self, x):
        for layer in self.layers:
            x = layer(_Slow.apply(x, self.trace))
        return x


class _Wire:
    """Messages of one kind, one at a time, each of which takes ``MESSAGE`` seconds.

    Attributes:
        waits: For each message that was waited for, whether it had not arrived.
    """

    def __init__(self, name, start, trace):
        self.name, self.start, self.trace = name, start, trace
        self.free, self.count, self.waits = 0.0, 0, []

    def __call__(self, *tensors, **options):
        handle, number = self.start(*tensors, **options), self.count % LAYERS
        self.free = max(self.free, time.perf_counter()) + MESSAGE
        self.count += 1
        self.trace.append(f"{self.name} {number} sent")
        return _Late(self, number, self.free, handle)


class _Late:
    def __init__(self, wire, number, due, handle):
        self.wire, self.number, self.due, self.handle = wire, number, due, handle

    def wait(self):
        pause = self.due - time.perf_counter()
        self.wire.waits.append(pause > 0)
        self.wire.trace.append(f"{self.wire.name} {self.number} waited for")
        time.sleep(max(pause, 0))
        self.handle.wait()


def _traced(*, zero, overlap):
    """The trace of the second step's backward, of the forward after it, and both wires."""
    trace = []
    net = _Net(trace)
    optimizer = ShardedOptimizer(
        net,
        torch.optim.SGD,
        group=Group.of(dist.group.WORLD),
        bucket_bytes=80,
        zero=zero,
        overlap=overlap,
        lr=0.1,
    )
    sums = _Wire("sum", messages.start_reduce_scatter_, trace)
    weights = _Wire("weights", messages.start_all_gather_, trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_messages, "start_reduce_scatter_", sums)
        patch.setattr(flat_parameters, "start_all_gather_", weights)
        for _ in range(2):  # the first backward agrees on an order, too
            loss = net(torch.ones(1, 4)).sum()
            trace.clear()
            sums.waits.clear()
            loss.backward()
            backward = list(trace)
            trace.clear()
            weights.waits.clear()
            optimizer.step()
        net(torch.ones(1, 4))
    optimizer.wait()
    return backward, trace, sums, weights


@ranks(2)
@pytest.mark.parametrize("zero", [1, 2])
def test_sums_travel_while_backward_goes_on(zero):
    trace, _, sums, _ = _traced(zero=zero, overlap=False)
    assert len(sums.waits) == LAYERS
    assert sums.waits[:-1] == [False] * (LAYERS - 1)  # all but the last hide behind layers
    begun = [trace.index(f"sum {number} sent") for number in range(LAYERS)]
    layers = [place for place, event in enumerate(trace) if event == "backward"]
    # Nothing is before the first layer, so that the last sum alone has no layer to hide behind.
    assert all(place < layer for place, layer in zip(begun[:-1], layers, strict=True))
    # With zero=2 two are under way at a time: memory of the first is free before the fourth.
    early = [trace.index(f"sum {number} waited for") < layers[-1] for number in range(LAYERS)]
    assert early == [zero == 2] * (LAYERS - 3) + [False] * 3


@ranks(2)
def test_weights_travel_while_the_next_forward_has_begun():
    _, trace, _, weights = _traced(zero=1, overlap=True)
    sent = [f"weights {number} sent" for number in range(LAYERS)]
    forward = [["forward", f"weights {number} waited for"] for number in range(LAYERS)]
    assert trace == [*sent, *(event for events in forward for event in events)]
    assert weights.waits == [False] * LAYERS


@ranks(2)
def test_without_overlap_the_step_waits():
    _, trace, _, _ = _traced(zero=1, overlap=False)
    assert trace.index(f"weights {LAYERS - 1} waited for") < trace.index("forward")
