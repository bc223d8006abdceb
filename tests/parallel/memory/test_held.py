"""Tensors saved by our own hooks raise torch's error when they were changed, and hold no more."""

import weakref

import pytest
import torch

from megablocks_core.parallel.memory.held import Held, Version

_MESSAGE = "modified by an inplace operation"


def test_an_unchanged_tensor_comes_back_itself():
    x = torch.ones(3)
    assert Held(x).tensor() is x


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[:1].mul_(2)])
def test_a_changed_tensor_raises_as_torch_does(change):
    held = Held(x := torch.ones(3))
    change(x)
    with pytest.raises(RuntimeError, match=_MESSAGE):
        held.tensor()

    y = (z := torch.ones(3, requires_grad=True) * 1).exp()
    change(y)
    with pytest.raises(RuntimeError, match=_MESSAGE):
        y.backward(z)


def test_a_version_holds_no_memory():
    x = torch.ones(1000)
    storage = weakref.ref(x.untyped_storage())
    version = Version(x)
    assert version.current
    del x
    assert storage() is None
    version.check()
