"""Losses of layers become one scalar, the same for any cut of layers, batches and ranks."""

import gc
import weakref

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe import GroupedExperts, LocalDispatcher, MoE
from megablocks_core.layers.moe.losses import load_balance_loss, total_loss, z_loss
from megablocks_core.layers.moe.routers import TopKRouter
from megablocks_core.parallel import recompute

COEFFICIENTS = {"load_balance": 0.01, "z": 0.001}


def routers(count):
    torch.manual_seed(0)
    return [TopKRouter(6, num_experts=4, top_k=2, dtype=torch.float64) for _ in range(count)]


def losses_of(layers, x, *, call=lambda layer, x: layer(x)):
    losses = {"load_balance": [], "z": []}
    for layer in layers:
        routing = call(layer, x)
        count = routing.num_tokens
        losses["load_balance"].append((load_balance_loss(routing, reduction="sum"), count))
        losses["z"].append((z_loss(routing, reduction="sum"), count))
    return losses


def tokens(count=12):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_it_is_the_sum_of_weighted_means():
    layers, x = routers(3), tokens()
    expected = sum(
        0.01 * load_balance_loss(layer(x)) + 0.001 * z_loss(layer(x)) for layer in layers
    )
    assert_close(total_loss(losses_of(layers, x), COEFFICIENTS), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_f075_stages_of_a_pipeline_add_up(stages):
    """Four mixtures in a row, cut by hand: a stage has its own losses and its input's gradient."""
    whole, cut = mixtures(4), mixtures(4)
    y, logged = stage_of(whole, tokens())
    (y.square().sum() + logged).backward()
    x, values, ends = tokens(), [], []
    for stage in range(stages):
        inside = x.detach().requires_grad_()
        x, value = stage_of(cut[stage * 4 // stages : (stage + 1) * 4 // stages], inside)
        values.append(value.detach())
        ends.append((inside, x, value))
    dy = 2 * x.detach()
    for inside, y, value in reversed(ends):
        torch.autograd.backward((y, value), (dy, None))
        dy = inside.grad
    assert_close(torch.stack(values).sum(), logged, atol=1e-12, rtol=0)
    for one, other in zip(cut, whole, strict=True):
        for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=0)


def mixtures(count):
    return [
        MoE(
            router=router,
            dispatcher=LocalDispatcher(),
            experts=GroupedExperts(4, 6, 5, dtype=torch.float64),
        )
        for router in routers(count)
    ]


def stage_of(layers, x):
    """What layers in a row give, and their losses as one."""
    losses = {"load_balance": [], "z": []}
    for layer in layers:
        y, routing = layer(x)
        x = x + y
        losses["load_balance"].append((load_balance_loss(routing), 1))
        losses["z"].append((z_loss(routing), 1))
    return x, total_loss(losses, COEFFICIENTS)


@pytest.mark.parametrize("micro_batches", [[6, 6], [2, 7, 3]])
def test_totals_of_micro_batches_add_up_to_means_weighted_by_tokens(micro_batches):
    x = tokens()
    (whole,), (cut,) = routers(1), routers(1)
    parts = x.split(micro_batches)
    expected = 0.001 * z_loss(whole(x))
    for part in parts:
        expected = expected + 0.01 * load_balance_loss(whole(part)) * len(part) / len(x)
    expected.backward()
    for part in parts:
        total_loss(losses_of([cut], part), COEFFICIENTS, num_tokens=len(x)).backward()
    assert_close(cut.weight.grad, whole.weight.grad, atol=1e-12, rtol=0)


def test_f074_seven_layers_give_seven_terms_a_step_and_evaluation_none():
    layers, x = routers(7), tokens()

    def step():
        losses = losses_of(layers, x, call=recompute)
        assert [len(losses[name]) for name in ("load_balance", "z")] == [7, 7]
        total_loss(losses, COEFFICIENTS).backward()
        grads = [layer.weight.grad for layer in layers]
        for layer in layers:
            layer.zero_grad()
        return grads

    plain = routers(7)
    total_loss(losses_of(plain, x), COEFFICIENTS).backward()
    first = step()
    with torch.no_grad():
        losses_of(layers, x)
    second = step()
    for one, other, layer in zip(first, second, plain, strict=True):
        assert torch.equal(one, other)
        assert_close(one, layer.weight.grad, atol=1e-12, rtol=0)


def test_f074_memory_is_flat_over_fifty_steps():
    layers, x, alive = routers(7), tokens(), []

    def live_tensors():
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    for step in range(50):
        total_loss(losses_of(layers, x, call=recompute), COEFFICIENTS).backward()
        with torch.no_grad():
            losses_of(layers, x)
        if step in (4, 49):
            alive.append(live_tensors())
    assert alive[1] <= alive[0]  # what earlier tests left may go meanwhile


def test_f074_a_weight_of_zero_keeps_nothing():
    layers, x = routers(2), tokens()
    losses = losses_of(layers, x)
    graphs = [weakref.ref(value) for value, _ in losses["load_balance"]]
    total = total_loss(losses, {"load_balance": 0.0, "z": 0.001})
    del losses
    assert all(graph() is None for graph in graphs)
    total.backward()
    nothing = total_loss(losses_of(layers, x), {"load_balance": 0.0})
    assert nothing == 0 and not nothing.requires_grad


def test_no_token_and_no_layer_give_zero():
    (layer,) = routers(1)
    total = total_loss(losses_of([layer], tokens(0)), COEFFICIENTS)
    total.backward()
    assert total == 0 and not layer.weight.grad.any()
    assert total_loss({"z": []}, {"z": 1.0}) == 0
    assert total_loss({"z": [(torch.tensor(3.0), 0)]}, {"z": 1.0}, num_tokens=0) == 3


def test_a_coefficient_of_no_loss_is_refused():
    with pytest.raises(ValueError, match=r"\['zloss'\] must be of losses that are there: \['z'\]"):
        total_loss({"z": []}, {"zloss": 0.1})
