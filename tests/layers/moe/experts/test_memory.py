"""Memory of gradients is used again, and never while anybody has it."""

import copy
import pickle
import sys
import threading

import pytest
import torch

from megablocks_core.layers.moe.dispatch import LocalDispatcher
from megablocks_core.layers.moe.experts.memory import KeptMemory
from tests.layers.moe.experts.cases import HIDDEN, built, everything, routing

ROUTED = routing([[0, 2], [1, 0], [3, 1], [0, 1]], dtype=torch.float32)


def _x():
    return torch.randn(4, HIDDEN)


def _experts(**options):
    return built(dtype=torch.float32, bias=True, **options)


def _addresses(experts):
    return [parameter.grad.data_ptr() for parameter in experts.parameters()]


def test_memory_that_nobody_has_is_handed_out_again():
    memory, like = KeptMemory(), torch.zeros(3, 4, 5)
    first = memory.tensor("a", like, *like.shape)
    assert first.shape == like.shape and first.is_contiguous() and not first.requires_grad
    address = first.data_ptr()
    assert memory.tensor("b", like, *like.shape).data_ptr() != address
    del first
    assert memory.tensor("a", like, *like.shape).data_ptr() == address


@pytest.mark.parametrize(
    "hold",
    (
        lambda tensor: tensor,
        lambda tensor: tensor[1:2, 0],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.numpy(),
    ),
)
def test_memory_that_somebody_has_is_left_alone(hold):
    memory, like = KeptMemory(), torch.zeros(3, 4)
    held = hold(memory.tensor("a", like, *like.shape).fill_(7))
    other = memory.tensor("a", like, *like.shape).fill_(1)
    assert _address(held) != other.data_ptr()


def _address(held):
    is_array = hasattr(held, "ctypes")
    return held.ctypes.data if is_array else held.untyped_storage().data_ptr()


def test_what_is_smaller_lies_in_it_and_what_is_larger_does_not():
    memory, like = KeptMemory(), torch.zeros(0)
    address = memory.tensor("a", like, 3, 4).data_ptr()
    smaller = memory.tensor("a", like.double(), 2, 3)
    assert smaller.data_ptr() == address and smaller.dtype == torch.float64
    assert smaller.shape == (2, 3) and smaller.is_contiguous()
    del smaller
    larger = memory.tensor("a", like, 13).fill_(1)
    assert larger.sum() == 13 and larger.untyped_storage().nbytes() == 52


def test_memory_of_other_devices_is_fresh():
    memory, like = KeptMemory(), torch.zeros(0, device="meta")
    assert memory.tensor("a", like, 3).is_meta and not memory._held


def test_copies_are_empty():
    memory, like = KeptMemory(), torch.zeros(1000)
    address = memory.tensor("a", like, *like.shape).data_ptr()
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert other.tensor("a", like, *like.shape).data_ptr() != address
    assert len(pickle.dumps(memory)) < 200


def test_gradients_lie_where_the_last_ones_did():
    experts, x = _experts(persistent_gradients=True), _x()
    theirs = everything(_experts(), x, ROUTED)
    everything(experts, x, ROUTED)
    addresses = _addresses(experts)
    for _ in range(2):
        mine = everything(experts, x, ROUTED)  # after zero_grad()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
        del mine
        assert _addresses(experts) == addresses


def test_a_gradient_that_is_held_stays_what_it_was():
    experts = _experts(persistent_gradients=True)
    first = everything(experts, _x(), ROUTED)
    before = {name: value.clone() for name, value in first.items()}
    everything(experts, _x(), ROUTED)
    assert all(torch.equal(value, before[name]) for name, value in first.items())
    assert not torch.equal(experts.up_proj.grad, first["up_proj"])


def test_experts_that_are_used_twice_in_a_step():
    def twice(experts, x):
        experts.zero_grad()
        one, two = (_results(experts, half) for half in (x, 2 * x))
        (one + two).square().sum().backward()
        return [parameter.grad.clone() for parameter in experts.parameters()]

    x = _x()
    mine, theirs = twice(_experts(persistent_gradients=True), x), twice(_experts(), x)
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two)


def _results(experts, x):
    dispatcher = LocalDispatcher()
    dispatched, handle = dispatcher.dispatch(x, ROUTED)
    return dispatcher.combine(experts(dispatched), handle)


def test_threads_never_get_the_same_memory():
    memory, like, shared = KeptMemory(), torch.zeros(0), []

    def look():
        for _ in range(2000):
            mine = memory.tensor("a", like, 1).fill_(threading.get_ident() % 2**20)
            if mine.item() != threading.get_ident() % 2**20:
                shared.append(mine)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not shared
