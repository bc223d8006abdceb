"""Tokens handed to experts by hand, and what experts make of them with every gradient."""

import torch

from megablocks_core.layers.moe.dispatch import LocalDispatcher
from megablocks_core.layers.moe.experts import GroupedExperts
from megablocks_core.layers.moe.routing import Routing

NUM_EXPERTS, HIDDEN, FFN = 4, 8, 16

# Experts of two slots of each token.
ROUTINGS = {
    "mixed": [[0, 2], [1, 0], [3, 1], [0, 1], [2, 0]],
    "all to one": [[1], [1], [1]],
    "some without tokens": [[0, 3], [3, 0], [0, 3]],
    "no token": torch.empty(0, 2, dtype=torch.int64),
    "one token": [[2, 1]],
    "every expert": [[3, 1, 0, 2], [0, 1, 2, 3]],
    "empty slots": [[0, -1], [-1, -1], [2, 0], [-1, 1]],
}


def routing(indices, *, capacity=None, dtype=torch.float64, num_experts=NUM_EXPERTS):
    """A routing with random weights, which have a gradient."""
    indices = torch.as_tensor(indices)
    weights = torch.rand(indices.shape, dtype=dtype).masked_fill(indices < 0, 0)
    scores = torch.zeros(len(indices), num_experts, dtype=dtype)
    counts = (indices.reshape(-1, 1) == torch.arange(num_experts)).sum(0)
    return Routing(indices, weights.requires_grad_(), scores, scores, counts, capacity=capacity)


def built(form="grouped", **options):
    """Experts whose biases are not small, of one seed."""
    torch.manual_seed(1)
    options = {"dtype": torch.float64, **options}
    return GroupedExperts(NUM_EXPERTS, HIDDEN, FFN, form=form, **options)


def everything(experts, x, routed, *, places=True):
    """Outputs and gradients of ``x``, of the weights and of each parameter."""
    x = x.detach().clone().requires_grad_()
    weights = routed.weights.detach().clone().requires_grad_()
    dispatcher = LocalDispatcher()
    dispatched, handle = dispatcher.dispatch(x, routed._replace(weights=weights))
    if not places:
        dispatched = dispatched._replace(places=None)
    experts.zero_grad()
    y = dispatcher.combine(experts(dispatched), handle)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    y.backward(dy)
    grads = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}


def assert_close(mine, theirs, *, rtol):
    """Equal by norm."""
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert value is not None and value.isfinite().all(), name
        error = (value.double() - theirs[name].double()).norm()
        assert error <= rtol * (1 + theirs[name].double().norm()), (name, error)
