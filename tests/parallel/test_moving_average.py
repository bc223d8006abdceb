"""Averages are those of one process, follow their weights in any layout, and lend themselves."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core import ckpt
from megablocks_core.groups import Group, logical_tensors, whole_tensor
from megablocks_core.parallel.moving_average import MovingAverage
from megablocks_core.parallel.muon.muon import Muon
from megablocks_core.parallel.published import Published
from megablocks_core.parallel.sharded_optimizer.sharded_optimizer import ShardedOptimizer
from megablocks_core.testing import ranks
from tests.parallel import muon_layouts

LAYOUTS = [muon_layouts.tp_dealt, muon_layouts.etp, muon_layouts.fsdp, muon_layouts.tp_fsdp]


def _wholes(model):
    return {name: whole_tensor(t, specs) for name, t, specs in logical_tensors(model)}


def _train(model, average, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        muon_layouts.set_gradients(model, step + 1)
        optimizer.step()
        average.update()


def _expected(num_steps, *, decay=0.7, warmup=10.0):
    """Weights and their averages, by plain arithmetic."""
    weights = muon_layouts.tensors(0)
    averages = dict(weights)
    for step in range(1, num_steps + 1):
        d = min(decay, (1 + step) / (warmup + step))
        for name, gradient in muon_layouts.tensors(step).items():
            weights[name] = weights[name] - 0.1 * gradient
            averages[name] = d * averages[name] + (1 - d) * weights[name]
    return weights, averages


def _check(model, expected):
    for name, whole in _wholes(model).items():
        assert_close(whole, expected[name], rtol=0, atol=1e-13)


@pytest.mark.parametrize("warmup", [1.0, 10.0])
def test_one_process_averages_by_the_formula(warmup):
    model, _ = muon_layouts.alone()
    average = MovingAverage(model, 0.7, warmup=warmup)
    _train(model, average, range(8))
    weights, averages = _expected(8, warmup=warmup)
    with average.swap():
        _check(model, averages)
    _check(model, weights)


@ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_shards_are_averaged_without_a_message(layout):
    model, _ = layout()
    average = MovingAverage(model, 0.7)
    with CommDebugMode() as traffic:
        _train(model, average, range(3))
    assert traffic.get_total_counts() == 0
    weights, averages = _expected(3)
    with average.swap():
        _check(model, averages)
    _check(model, weights)


@ranks(4)
def test_a_checkpoint_goes_on_in_another_layout(tmp_path):
    world = Group.of(dist.group.WORLD)
    model, _ = muon_layouts.tp_fsdp()
    average = MovingAverage(model, 0.7)
    _train(model, average, range(3))
    ckpt.save(tmp_path / "saved", {"model": model, "average": average}, group=world)
    for after in (muon_layouts.fsdp, muon_layouts.etp):
        model, _ = after()
        average = MovingAverage(model, 0.7)
        ckpt.load(tmp_path / "saved", {"model": model, "average": average}, group=world)
        _train(model, average, range(3, 5))
        with average.swap():
            _check(model, _expected(5)[1])


@ranks(2)
def test_gathered_weights_of_fsdp_are_not_used_in_place_of_averages():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole = nn.Linear(4, 4)
    model = copy.deepcopy(whole)
    fully_shard(model, reshard_after_forward=False)
    average = MovingAverage(model, 0.5, warmup=1.0)
    x = torch.ones(1, 4)
    model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
        average.update()
        whole.weight.add_(0.5)
        whole.bias.add_(0.5)
        model(x)  # its weights stay gathered
        with average.swap():
            assert_close(model(x), whole(x))
        whole.weight.add_(0.5)
        whole.bias.add_(0.5)
        assert_close(model(x), whole(x))


class _Ranges:
    """An optimizer's float32 copies, of which each rank has a range with padding at the end."""

    def __init__(self, model, group):
        self.fields = []
        for parameter in model.parameters():
            size = -(-parameter.numel() // group.size)
            flat = (group.rank * size, (group.rank + 1) * size)
            whole = torch.zeros(group.size * size)
            whole[: parameter.numel()] = parameter.detach().float().flatten()
            if flat[0] < parameter.numel():
                self.fields.append((parameter, "master", whole[slice(*flat)].clone(), flat))
            self.fields.append((parameter, "exp_avg", torch.zeros(size), flat))

    def logical_state(self):
        return Published(self.fields)


@ranks(4)
def test_masters_in_ranges_are_averaged_where_they_lie():
    group = Group.of(dist.group.WORLD)
    torch.manual_seed(0)
    model = nn.Linear(3, 3).bfloat16()
    first = {name: p.detach().float() for name, p in model.named_parameters()}
    masters = _Ranges(model, group)
    average = MovingAverage(model, 0.5, warmup=1.0, masters=masters, group=group)
    for _, field, tensor, _ in masters.fields:
        if field == "master":
            tensor.add_(2.0**-10)  # lost in the weights
    average.update()
    with average.swap():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, (first[name] + 2.0**-11).bfloat16())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.float(), first[name])
    with pytest.raises(ValueError, match=r"\['weight', 'bias'\] must each have one master"):
        MovingAverage(model, 0.5, masters=masters)


def _check_that_it_averages(average, model):
    """An average without a past has the weights of its update, whatever they are later."""
    average.update()
    weights = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with average.swap():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            assert torch.equal(parameter, weight)


@ranks(2)
def test_masters_that_muon_has_dealt_out_are_averaged():
    group = Group.of(dist.group.WORLD)
    model = muon_layouts.Parts(dtype=torch.bfloat16)
    optimizer = Muon(model, lr=0.1, group=group, expert_group=group)
    average = MovingAverage(model, 0.0, masters=optimizer, group=group, expert_group=group)
    muon_layouts.set_gradients(model, 1)
    optimizer.step()
    _check_that_it_averages(average, model)


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"zero": 2, "overlap": True}, {"offload": True}])
def test_masters_of_a_sharded_optimizer_are_averaged(options):
    group = Group.of(dist.group.WORLD)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).bfloat16()
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, group=group, lr=0.1, **options)
    average = MovingAverage(model, 0.0, masters=optimizer, group=group)
    model(torch.ones(2, 3).bfloat16()).sum().backward()
    optimizer.step()
    _check_that_it_averages(average, model)


def test_16_bit_weights_are_averaged_in_float32():
    model = nn.Linear(2, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
        average = MovingAverage(model, 0.999, warmup=1.0)
        model.weight.fill_(2.0)
    for _ in range(1000):
        average.update()
    with average.swap():
        assert_close(model.weight[0, 0].item(), 2 - 0.999**1000, rtol=2**-8, atol=0)


def test_backward_through_an_output_from_before_raises():
    model = nn.Linear(2, 2)
    average = MovingAverage(model, 0.9)
    x = torch.ones(1, 2, requires_grad=True)
    y = model(x).sum()
    with average.swap():
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_what_is_frozen_has_no_average_and_an_error_inside_gives_weights_back():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    average = MovingAverage(model, 0.9)
    assert [field[1] for field in average.logical_state().fields] == ["average"]
    with torch.no_grad():
        model.weight.add_(1.0)
    before = model.weight.detach().clone()
    with pytest.raises(KeyError), average.swap():
        assert not torch.equal(model.weight, before)
        with pytest.raises(ValueError, match="must not be swapped"):
            average.update()
        with pytest.raises(ValueError, match="must not be swapped"), average.swap():
            pass
        raise KeyError
    assert torch.equal(model.weight, before)
    average.update()
    model.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"\['bias'\] must be trained when"):
        average.update()
