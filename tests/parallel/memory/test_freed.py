"""Outputs of a recomputed region are freed, and come back to whoever saved them."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megablocks_core.parallel.memory.recompute import recompute
from tests.parallel.watching import Operations


class _Producer:
    """``exp`` that counts its calls and watches the memory of its last result."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        y = x.exp()
        self.storage = weakref.ref(y.untyped_storage())
        return y

    @property
    def alive(self):
        return self.storage() is not None


def _x():
    return torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 3, 4).requires_grad_()


def _linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4, dtype=torch.float64)


_LINEAR = _linear()
_TABLE = torch.ones(3, 4, 4, dtype=torch.float64)

# What consumers save: the output, a reshaped one, a part, several parts, it twice, a transposed.
_CONSUMERS = {
    "linear": _LINEAR,
    "square": torch.square,
    "product": lambda y: y[..., :2] * y[..., 2:],
    "twice": lambda y: y.sin() + _LINEAR(y) * y,
    "transposed": lambda y: y.mT.sin(),
    "batched": lambda y: torch.bmm(y.transpose(0, 1), _TABLE),
}


@pytest.mark.parametrize("name", _CONSUMERS)
def test_an_output_is_freed_and_computed_once_more(name):
    consumer, results = _CONSUMERS[name], []
    for way in ("plain", "into"):
        producer, x = _Producer(), _x()
        y = consumer(producer(x)) if way == "plain" else recompute(producer, x, into=consumer)
        assert producer.alive == (way == "plain")
        _LINEAR.zero_grad()
        with Operations() as seen:
            y.sum().backward()
        assert producer.calls == (1 if way == "plain" else 2)
        assert not producer.alive
        results.append((y, x.grad, seen.names.count("aten::mm") + seen.names.count("aten::addmm")))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2], "the consumer's products run no second time"


def test_what_else_holds_the_output_goes_on_holding_it():
    """A view that is given out, and an operation outside that saves it."""
    producer, x, outside = _Producer(), _x(), []

    def consumer(y):
        outside.append(y[0])
        return y.sin()

    y = recompute(producer, x, into=consumer)
    part = outside.pop()
    expected = part.detach().clone()
    z = part.square()
    assert producer.alive
    del part
    assert producer.alive, "square saved it"
    (y.sum() + z.sum()).backward()
    reference = _x()
    e = reference.exp()
    (e.sin().sum() + e[0].square().sum()).backward()
    assert torch.equal(x.grad, reference.grad)
    assert torch.equal(expected, e[0])


def test_a_consumer_may_change_the_output_in_place():
    """What it saved before the change raises in torch; here it is computed again, and right."""
    for change in (lambda y: F.relu(y, inplace=True).sin(), lambda y: y.mul_(2).square()):
        x, reference = _x(), _x()
        recompute(torch.sin, x, into=change).sum().backward()
        change(reference.sin()).sum().backward()
        assert torch.equal(x.grad, reference.grad)


def test_other_tensors_of_the_consumer_are_checked_as_ever():
    weight = torch.ones(4, dtype=torch.float64)
    y = recompute(torch.sin, _x(), into=lambda y: (y * weight).sum())
    weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_nests_of_outputs_and_outputs_without_gradient():
    index = torch.tensor([1, 0])

    def producer(x):
        return {"y": (x.exp(), x.sin().transpose(0, 1)), "index": index, "text": "a"}

    def consumer(made):
        a, b = made["y"]
        return (a[made["index"]] * b.transpose(0, 1)).sum()

    x, reference = _x(), _x()
    recompute(producer, x, into=consumer).backward()
    consumer(producer(reference)).backward()
    assert torch.equal(x.grad, reference.grad)

    frozen = recompute(lambda x: x.detach().exp(), x, into=_LINEAR)
    frozen.sum().backward()


def test_a_gradient_of_the_consumer_alone_leaves_nothing_behind():
    producer, x = _Producer(), _x()
    y = recompute(producer, x, into=_LINEAR)
    (gradient,) = torch.autograd.grad(y.sum(), _LINEAR.weight)
    assert gradient.abs().sum() > 0
    del y
    gc.collect()
    assert not producer.alive


def test_second_walks_compute_it_again():
    producer, x = _Producer(), _x()
    y = recompute(producer, x, into=torch.sin)
    gradients = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(3)]
    assert producer.calls == 4 and not producer.alive
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_hooks_around_serve_what_the_consumer_saves_otherwise():
    packed = []

    def pack(x):
        packed.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = recompute(torch.exp, _x(), into=lambda y: y * torch.ones(4, dtype=torch.float64))
    assert packed == [(2, 3, 4), (4,)]
    y.sum().backward()
