"""An attached loss is differentiated with the activation that it travels with."""

import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from megablocks_core.layers.moe.losses import attach_loss, load_balance_loss, z_loss
from megablocks_core.layers.moe.routers import TopKRouter
from megablocks_core.parallel import recompute


class Block(nn.Module):
    """A layer that returns one tensor alone."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.router = TopKRouter(6, num_experts=4, top_k=2, dtype=torch.float64)
        self.scale = scale

    def forward(self, x):
        routing = self.router(x)
        loss = load_balance_loss(routing) + 0.1 * z_loss(routing)
        y = x * routing.weights.sum(-1, keepdim=True)
        return attach_loss(y, loss, scale=self.scale)


def inputs():
    return torch.randn(5, 6, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25, dtype=torch.float64)])
@pytest.mark.parametrize("call", [lambda layer, x: layer(x), recompute])
def test_gradients_are_those_of_the_sum(scale, call):
    block, twin, x = Block(scale), Block(0.0), inputs()
    x_ref = x.detach().clone().requires_grad_()
    y = call(block, x)
    assert torch.equal(y, twin(x_ref))
    y.square().sum().backward()
    routing = twin.router(x_ref)
    loss = load_balance_loss(routing) + 0.1 * z_loss(routing)
    (twin(x_ref).square().sum() + 0.25 * loss).backward()
    assert_close(block.router.weight.grad, twin.router.weight.grad, atol=1e-12, rtol=0)
    assert_close(x.grad, x_ref.grad, atol=1e-12, rtol=0)


def test_it_does_not_depend_on_the_size_of_the_main_loss():
    loss = torch.ones((), requires_grad=True)
    y = attach_loss(torch.ones(3, requires_grad=True), loss, scale=0.5)
    (1000 * y).sum().backward()
    assert loss.grad == 0.5


def test_nothing_is_kept_where_nothing_is_differentiated():
    weight = torch.ones(3, requires_grad=True)
    y = torch.ones(3, requires_grad=True)
    loss = weight.sum() ** 2
    graph = weakref.ref(loss)
    with torch.no_grad():
        free = attach_loss(y, loss, scale=2.0)
    without = attach_loss(y, loss, scale=0.0)
    del loss
    assert graph() is None
    assert free.grad_fn is None
    without.sum().backward()
    assert weight.grad is None


def test_it_compiles_as_one_graph():
    block = Block(0.25)
    whole = torch.compile(
        lambda y, loss: attach_loss(y, loss, scale=0.25), fullgraph=True, backend="aot_eager"
    )
    x = inputs()
    loss = z_loss(block.router(x))
    whole(2 * x, loss).sum().backward()
    assert_close(block.router.weight.grad, _gradient_of_quarter(block, x))


def _gradient_of_quarter(block, x):
    (gradient,) = torch.autograd.grad(0.25 * z_loss(block.router(x)), block.router.weight)
    return gradient


def test_a_loss_with_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"loss of shape \[2\]"):
        attach_loss(torch.ones(3), torch.ones(2), scale=1.0)
