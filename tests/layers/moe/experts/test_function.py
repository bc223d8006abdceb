"""What experts keep for backward, and how they hand over gradients."""

import pytest
import torch
from torch import nn

from megablocks_core.layers.moe.dispatch import LocalDispatcher
from megablocks_core.layers.moe.experts import GroupedExperts
from tests.layers.moe.experts.cases import HIDDEN, built, everything, routing

NUM_EXPERTS, TOKENS, WIDTH = 16, 64, 32


@pytest.mark.parametrize("features", (WIDTH // 2, WIDTH // 8))
@pytest.mark.parametrize("form", ("grouped", "capacity"))
def test_kept_for_backward_are_tokens_first_products_and_integers(form, features):
    kept = {top_k: _kept(form, top_k, features) for top_k in (2, 8)}
    for top_k, tensors in kept.items():
        places = TOKENS * top_k
        floats = [x for x in tensors if x.is_floating_point()]
        assert sum(x.numel() for x in floats) == TOKENS * WIDTH + 2 * places * features + places
        integers = sum(x.numel() for x in tensors if not x.is_floating_point())
        assert integers <= 2 * places + NUM_EXPERTS


def test_kept_bytes_at_constant_k_f_do_not_grow_with_k():
    few, many = _kept("grouped", 2, WIDTH // 2), _kept("grouped", 8, WIDTH // 8)
    # But for the weight, the row and the slot of each place.
    own = {2: TOKENS * 2 * (4 + 8 + 8), 8: TOKENS * 8 * (4 + 8 + 8)}
    bytes_few, bytes_many = (sum(x.nbytes for x in kept) for kept in (few, many))
    assert bytes_many - own[8] == bytes_few - own[2]


def test_persistent_gradients_are_the_same_and_stay_where_they_are():
    routed, x = routing([[0, 2], [1, 0], [3, 1]]), torch.randn(3, HIDDEN, dtype=torch.float64)
    plain, persistent = (built(bias=True, persistent_gradients=own) for own in (False, True))
    theirs = everything(plain, x, routed)
    mine = everything(persistent, x, routed)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    places = [parameter.grad.data_ptr() for parameter in persistent.parameters()]
    _backward(persistent, x, routed)
    for parameter, place, name in zip(
        persistent.parameters(), places, dict(plain.named_parameters()), strict=True
    ):
        assert parameter.grad.data_ptr() == place
        torch.testing.assert_close(parameter.grad, 2 * theirs[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("capacity", (None, 3))
def test_persistent_gradients_leave_parameters_with_hooks_and_others_alone(capacity):
    routed = routing([[0, 2], [1, 0], [3, 1]], capacity=capacity)
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    experts, seen = built(persistent_gradients=True), []
    experts.up_proj.register_hook(lambda grad: seen.append(grad.clone()))
    experts.down_proj.register_post_accumulate_grad_hook(lambda parameter: seen.append("post"))
    experts.gate_proj.requires_grad_(False)
    theirs = everything(built(), x, routed)
    _backward(experts, x, routed)
    (of_hook,) = (each for each in seen if each != "post")
    assert "post" in seen and torch.equal(of_hook, theirs["up_proj"])
    assert experts.gate_proj.grad is None
    assert torch.equal(experts.up_proj.grad, theirs["up_proj"])
    assert torch.equal(experts.down_proj.grad, theirs["down_proj"])


@pytest.mark.parametrize("form", ("grouped", "capacity", "compiled"))
@pytest.mark.parametrize("weigh", ("hidden", "input", "output"))
def test_empty_places_give_zeros_and_their_weights_get_none(form, weigh):
    torch._dynamo.reset()
    capacity = 3 if form == "capacity" else None
    routed = routing([[0, -1], [-1, -1], [2, 0], [-1, 1]], capacity=capacity)
    x = torch.randn(4, HIDDEN, dtype=torch.float64)
    dispatched, _ = LocalDispatcher().dispatch(x, routed)
    weights = dispatched.weights.detach().requires_grad_()
    experts = built("capacity" if capacity else "grouped", bias=True, weigh=weigh)
    call = torch.compile(experts, backend="eager") if form == "compiled" else experts
    y = call(dispatched._replace(weights=weights))
    y.backward(torch.ones_like(y))
    empty = dispatched.rows < 0
    assert empty.any() and not y[empty].any() and not weights.grad[empty].any()
    assert weights.grad[~empty].all()


def test_frozen_experts_and_tokens_without_gradient():
    routed, x = routing([[0, 2], [1, 0]]), torch.randn(2, HIDDEN, dtype=torch.float64)
    frozen = built().requires_grad_(False)
    theirs, mine = everything(built(), x, routed), everything(frozen, x, routed)
    assert torch.equal(mine["x"], theirs["x"]) and mine["up_proj"] is None
    experts = built()
    _backward(experts, x, routed)
    assert torch.equal(experts.up_proj.grad, theirs["up_proj"])


def test_a_second_derivative_raises():
    experts, routed = built(), routing([[0, 2], [1, 0]])
    x = torch.randn(2, HIDDEN, dtype=torch.float64, requires_grad=True)
    dispatched, _ = LocalDispatcher().dispatch(x, routed)
    y = experts(dispatched)
    dy = torch.ones_like(y, requires_grad=True)
    (grad,) = torch.autograd.grad(y, x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def _backward(experts: nn.Module, x, routed):
    dispatcher = LocalDispatcher()
    dispatched, handle = dispatcher.dispatch(x, routed)
    y = dispatcher.combine(experts(dispatched), handle)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))


def _kept(form, top_k, features):
    """What is kept besides the parameters, each tensor once."""
    experts = GroupedExperts(NUM_EXPERTS, WIDTH, features, form=form)
    indices = torch.stack([torch.arange(top_k) + i for i in range(TOKENS)]) % NUM_EXPERTS
    capacity = TOKENS * top_k // NUM_EXPERTS if form == "capacity" else None
    routed = routing(indices, capacity=capacity, dtype=torch.float32, num_experts=NUM_EXPERTS)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    dispatched, _ = LocalDispatcher().dispatch(x, routed)
    own = {parameter.data_ptr() for parameter in experts.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = experts(dispatched)
    assert y.requires_grad
    return list(kept.values())
