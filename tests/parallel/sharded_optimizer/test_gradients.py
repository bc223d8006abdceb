"""Gradients that a backward has reduced are stepped, once; others are refused."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import LOCAL, Group
from megablocks_core.groups.gradient_shards import ShardedGradient, gradient_shard
from megablocks_core.parallel import DataParallel, ShardedOptimizer, reduce_gradients
from megablocks_core.testing import ranks


def _world():
    return Group.of(dist.group.WORLD)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def _sgd(module, **options):
    return ShardedOptimizer(module, torch.optim.SGD, group=_world(), lr=1.0, **options)


def _backward(model, scale=1.0):
    (model(torch.ones(2, 3)).sum() * scale).backward()


@ranks(2)
def test_ranges_hang_on_the_parameters_until_they_are_used_or_dropped():
    group, model = _world(), _model()
    optimizer = _sgd(model)
    _backward(model, group.rank)
    for parameter in model.parameters():
        assert type(parameter.grad) is ShardedGradient
        shard = gradient_shard(parameter)
        assert shard is not None and shard.group == group
        parts = group.all_gather(shard.tensor)
        assert sum(map(len, parts)) == parameter.numel()
    assert torch.equal(
        torch.cat(group.all_gather(gradient_shard(model[1].bias).tensor)), torch.ones(2)
    )
    optimizer.zero_grad()
    assert gradient_shard(model[1].bias) is None
    _backward(model)
    before = model[1].bias.detach().clone()
    optimizer.step()
    assert gradient_shard(model[1].bias) is None
    optimizer.step()  # nothing is left to step
    assert torch.equal(model[1].bias, before - 2)
    model.zero_grad()  # so this suffices between steps
    _backward(model)
    optimizer.step()
    assert torch.equal(model[1].bias, before - 4)


@ranks(1, 2)
@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_that_the_module_drops_are_forgotten(zero):
    model, parted = _model(), _model()
    optimizer = _sgd(model, zero=zero)
    before = model[1].bias.detach().clone()
    _backward(model, float("nan"))
    model.zero_grad()  # a step is skipped
    optimizer.step()
    assert torch.equal(model[1].bias, before)
    _backward(model, float("nan"))
    model.zero_grad()
    with optimizer.no_sync():
        _backward(model, float("nan"))
    model.zero_grad()
    with optimizer.no_sync():
        _backward(model)
    _backward(model)
    model[1].weight.grad = None  # one of two in a bucket
    kept = model[1].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[1].bias, before - 4)
    assert torch.equal(model[1].weight, kept)
    assert not torch.equal(model[0].weight, parted[0].weight)


@ranks(2)
def test_what_reads_grad_is_told_where_gradients_are():
    model = _model()
    optimizer = _sgd(model)
    _backward(model)
    for read in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: [parameter.grad.norm() for parameter in model.parameters()],
        lambda: torch.optim.SGD(model.parameters(), lr=1.0).step(),
        lambda: model.zero_grad(set_to_none=False),
    ):
        with pytest.raises(RuntimeError, match=r"must not be read or changed in \.grad"):
            read()
    assert "ShardedGradient(shape=(2,)" in repr(model[1].bias.grad)
    assert copy.deepcopy(model)[1].bias.grad is None
    optimizer.zero_grad(set_to_none=False)
    assert model[1].bias.grad is None


@ranks(2)
def test_gradients_that_no_backward_has_reduced_are_refused():
    model = _model()
    optimizer = _sgd(model)
    with optimizer.no_sync():
        _backward(model)
    with pytest.raises(RuntimeError, match="no_sync"):
        optimizer.step()
    _backward(model)
    optimizer.step()
    model[0].bias.grad = torch.ones(5)
    with pytest.raises(RuntimeError, match="'0.bias' was set by hand"):
        optimizer.step()
    optimizer.zero_grad()
    _backward(model)
    optimizer.step()


@ranks(2)
def test_an_error_between_forward_and_backward_costs_nothing_and_one_in_backward_is_named():
    model, twin = _model(), _model()
    optimizer, peer = _sgd(model), _sgd(twin)
    with pytest.raises(ZeroDivisionError):
        _backward(model, 1 / (0 * model(torch.ones(2, 3)).sum().item()))
    for net, one in ((model, optimizer), (twin, peer)):
        _backward(net)
        one.step()
    assert torch.equal(model[0].weight, twin[0].weight)
    y = model[0](torch.ones(2, 3))
    y.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (model[1](y).sum() + y.sum()).backward()
    with pytest.raises(RuntimeError, match="broken off"):
        _backward(model)


@ranks(2)
def test_parameters_without_a_module_are_reduced_too():
    group, model = _world(), _model()
    optimizer = _sgd(model.parameters())
    before = model[1].bias.detach().clone()
    _backward(model, group.rank)  # 0 and 1: 1 on average, of two rows
    reduce_gradients(model, group=group)  # finds none, and does no harm
    optimizer.step()
    assert torch.equal(model[1].bias, before - 1)


@ranks(2)
def test_f_052_one_wrapper_reduces_and_the_optimizer_follows_it():
    group = _world()
    for reduction in ("mean", "sum"):
        model = _model()
        wrapped = DataParallel(model, group=group, reduction=reduction)
        optimizer = _sgd(wrapped, reduction=reduction)
        before = model[1].bias.detach().clone()
        _backward(wrapped)
        optimizer.step()
        times = group.size if reduction == "sum" else 1
        assert torch.equal(model[1].bias, before - 2 * times)
        other = "sum" if reduction == "mean" else "mean"
        for options, text in (
            ({"reduction": other}, f"reduction='{other}'"),
            ({"reduction": reduction, "zero": 2}, "zero=2"),
            ({"reduction": reduction, "expert_group": group}, "expert_group="),
        ):
            with pytest.raises(ValueError, match=text):
                _sgd(wrapped, **options)
        with pytest.raises(ValueError, match="reduced by another wrapper|wrapped"):
            _sgd(model)
        with pytest.raises(ValueError, match="wrapped"):
            _sgd(nn.Sequential(wrapped))
    sharded = _model()
    _sgd(sharded)
    kept = _sgd(sharded)  # the first one is gone
    with pytest.raises(ValueError, match="another wrapper"):
        _sgd(sharded)
    with pytest.raises(ValueError, match="wrapped"):
        _sgd(nn.parallel.DistributedDataParallel(_model()))
    assert kept.param_groups


@ranks(1, 2)
def test_f_053_four_micro_batches_on_one_rank_or_two_are_scaled_once():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = ShardedOptimizer(model, torch.optim.SGD, group=_world(), lr=1.0)
    for _ in range(4):
        (model(torch.ones(1, 1)).sum() / 4).backward()
    optimizer.step()
    assert model.weight.item() == -1.0


@ranks(2)
def test_a_step_between_forward_and_backward_is_noticed():
    for group in (_world(), LOCAL):
        model = _model()
        optimizer = ShardedOptimizer(model, torch.optim.SGD, group=group, lr=1.0)
        y = model(torch.ones(2, 3)).sum()
        _backward(model)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@ranks(2)
def test_copies_of_the_module_are_plain():
    model = _model()
    optimizer = _sgd(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _backward(other)
        assert other[0].weight.grad is not None
    assert gradient_shard(model[0].weight) is None
    for make in (copy.deepcopy, pickle.dumps, copy.copy):
        with pytest.raises(ValueError, match="must not be copied"):
            make(optimizer)


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"zero": 2, "overlap": True}])
def test_a_dropped_optimizer_leaves_no_hook_on_the_module(options):
    model = _model()
    for _ in range(2):
        optimizer = _sgd(model, **options)
        _backward(model)
        optimizer.step()
        assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
        del optimizer
        assert not model._forward_hooks and not model._forward_pre_hooks
