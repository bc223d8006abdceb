"""A loss that computes its gradients itself is one like any other to autograd."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, linear
from torch.testing import assert_close

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.parallel import linear_cross_entropy
from megablocks_core.testing import ranks
from tests.parallel.watching import Watch


def _inputs(vocab_size, length, *, features=6, dtype=torch.float64):
    """Hidden states, weight, bias and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((length, features), (vocab_size, features), (vocab_size,))
    tensors = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    targets = torch.randint(vocab_size, (length,), generator=generator)
    return [x.requires_grad_() for x in tensors], targets


def test_losses_scaled_by_the_caller_and_backward_run_twice():
    (hidden, weight, bias), targets = _inputs(11, 7)
    inputs = [hidden, weight, bias]
    right = torch.autograd.grad(cross_entropy(linear(*inputs), targets), inputs)
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction)
        loss = loss.mean()
        first = torch.autograd.grad(loss * 3.0, inputs, retain_graph=True)
        second = torch.autograd.grad(loss * -0.5, inputs, retain_graph=True)
        (alone,) = torch.autograd.grad(loss, weight)
        for one, two, exact in zip(first, second, right, strict=True):
            assert_close(one, 3.0 * exact, rtol=0, atol=1e-12)
            assert_close(two, -0.5 * exact, rtol=0, atol=1e-12)
        assert_close(alone, right[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_second_derivative_raises(reduction):
    (hidden, weight, _), targets = _inputs(5, 3)
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction) * factor
    (gradient,) = torch.autograd.grad(loss.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@ranks(1, 2)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inputs_are_saved_and_nothing_outlives_backward(reduction):
    group = Group.of(dist.group.WORLD)
    (hidden, weight, bias), targets = _inputs(10, 8)
    rows = chunk_slice(10, group.size, group.rank)
    leaves = [hidden, *(x.detach()[rows].clone().requires_grad_() for x in (weight, bias))]
    saved = []

    def pack(x):
        saved.append(x.data_ptr())
        return x

    with Watch() as watch:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = linear_cross_entropy(
                *leaves[:2], targets, bias=leaves[2], reduction=reduction, group=group
            )
        assert {leaf.data_ptr() for leaf in leaves} <= set(saved)
        # And the targets, which of them count, and the mean's divisor.
        assert len(saved) == 5 + (reduction == "mean")
        loss.sum().backward()
    del loss
    gradients = {leaf.grad.data_ptr() for leaf in leaves}
    assert len(watch.made) > 50
    for _ in range(300):
        if not _alive(watch, gradients):
            return
        time.sleep(0.01)  # until gloo's thread lets go of the last message
    raise AssertionError(f"alive: {_alive(watch, gradients)}")


def _alive(watch, known):
    """The shapes of tensors that are still there; none is held by this list."""
    there = [x() for x in watch.made if x() is not None]
    return [x.shape for x in there if x.data_ptr() not in known]
