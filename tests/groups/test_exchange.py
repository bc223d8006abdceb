"""An all-to-all in two steps is one in a step, and both its ways overlap with other work."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, all_to_all, exchange
from megablocks_core.groups.exchange import start_exchange
from megablocks_core.testing import ranks


def _world():
    return Group.of(dist.group.WORLD)


def _rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, generator=generator, dtype=torch.float64)


def _splits(group):
    counts = [[(r + 2 * s) % 4 for s in range(group.size)] for r in range(group.size)]
    return counts[group.rank], [row[group.rank] for row in counts]


@ranks(1, 2, 4)
def test_two_steps_are_one(num_exchanges=3):
    """Several are under way at a time, each of two tensors."""
    group = _world()
    send, receive = _splits(group)
    x = [_rows(sum(send), 10 * group.rank + i).requires_grad_() for i in range(num_exchanges)]
    w = [_rows(sum(send), 50 + group.rank)[:, 0].clone().requires_grad_() for _ in x]

    def results(pairs):
        return sum((y * v.unsqueeze(1)).square().sum() * (i + 1) for i, (y, v) in enumerate(pairs))

    options = {"send": send, "receive": receive, "group": group}
    flying = [start_exchange(*pair, **options) for pair in zip(x, w, strict=True)]
    stepwise = torch.autograd.grad(results([one.wait() for one in flying]), x + w)
    pairs = [[all_to_all(t, **options) for t in pair] for pair in zip(x, w, strict=True)]
    at_once = torch.autograd.grad(results(pairs), x + w)
    for ours, theirs in zip(stepwise, at_once, strict=True):
        assert torch.equal(ours, theirs)


@ranks(2)
def test_it_is_the_adjoint():
    """<exchange(x), y> = <x, backward(y)>, summed over ranks."""
    group = _world()
    send, receive = _splits(group)
    x, y = _rows(sum(send), group.rank).requires_grad_(), _rows(sum(receive), 7 + group.rank)
    (out,) = start_exchange(x, send=send, receive=receive, group=group).wait()
    (dx,) = torch.autograd.grad(out, x, y)
    assert_close(group.all_reduce((out.detach() * y).sum()), group.all_reduce((x * dx).sum()))


@ranks(2, 4)
def test_a_tensor_whose_result_is_not_used_sends_zeros_back():
    group = _world()
    ones = [1] * group.size
    x, w = (_rows(group.size, i).requires_grad_() for i in range(2))
    y, v = start_exchange(x, w, send=ones, receive=ones, group=group).wait()
    (y.sum() if group.rank == 0 else v.sum()).backward()
    from_first = torch.tensor([1.0] + [0.0] * (group.size - 1), dtype=torch.float64)
    assert_close(x.grad, from_first.unsqueeze(1).expand(-1, 2))
    both = [x.grad, w.grad]
    assert_close(torch.stack(both).sum(0), torch.ones_like(x))


@ranks(2, backend="delayed")
def test_what_is_computed_in_between_overlaps_both_ways():
    """Messages start before the other work and are waited for after it."""
    group = _world()
    ones = [1] * group.size
    trace = []

    def traced(name, call):
        def wrapped(*args, **options):
            trace.append(name)
            return call(*args, **options)

        return wrapped

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            trace.append("work")
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dx):
            trace.append("work")
            return dx

    x, other = _rows(group.size, 0).requires_grad_(), _rows(1, 1).requires_grad_()
    right = exchange.start_all_to_all, exchange.wait
    exchange.start_all_to_all = traced("start", right[0])
    exchange.wait = traced("wait", right[1])
    try:
        flying = exchange.start_exchange(x, send=ones, receive=ones, group=group)
        worked = Work.apply(other)
        (y,) = flying.wait()
        assert trace == ["start", "work", "wait"]
        (y.sum() + worked.sum()).backward()
        assert trace == ["start", "work", "wait"] * 2
    finally:
        exchange.start_all_to_all, exchange.wait = right
    assert_close(x.grad, torch.ones_like(x))


@ranks(1, 2)
def test_rows_that_do_not_fit_raise():
    group = _world()
    ones = [1] * group.size
    with pytest.raises(ValueError, match="send=.* must add up to the 5 rows of x"):
        start_exchange(torch.ones(5, 2), send=ones, receive=ones, group=group)


def test_alone_nothing_is_sent():
    x = torch.ones(3, 2)
    assert start_exchange(x, send=[3], receive=[3], group=LOCAL).wait() == (x,)


@ranks(2)
def test_compiled_exchanges_equal_eager_ones():
    group = _world()

    def function(x):
        flying = start_exchange(x, send=[1, 2], receive=[1 + group.rank] * 2, group=group)
        return flying.wait()[0].square().sum()

    x = _rows(3, group.rank).requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (ours,), (theirs,) = (torch.autograd.grad(f(x), x) for f in (compiled, function))
    assert_close(ours, theirs)
