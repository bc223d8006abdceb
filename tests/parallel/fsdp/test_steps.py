"""Between passes nothing is stale, nothing is lost, and ranks know what none of them used."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from megablocks_core.groups import LOCAL, Mesh, ShardSpec, gather_whole, mark, marks, whole_tensor
from megablocks_core.parallel import PrecisionPolicy, fully_shard, no_sync
from megablocks_core.testing import ranks


class Net(nn.Module):
    """Two layers that may raise on the way, forward or backward, and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 2)
        self.spare = nn.Linear(3, 3)

    def forward(self, x, *, fails="", spare=False):
        x = self.layers[0](x).tanh()
        if fails == "forward":
            raise ArithmeticError("forward")
        if fails == "backward":
            x = Failing.apply(x)
        x = self.layers[1](x)
        return self.head(self.spare(x) if spare else x)


class Failing(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise ArithmeticError("backward")


def sharded(**options) -> Any:
    """A net on all ranks, its twin in one process, and the tokens."""
    group = Mesh().group("dp")
    torch.manual_seed(0)
    net, twin = Net().double(), Net().double()
    twin.load_state_dict(net.state_dict())
    x = torch.arange(3.0 * group.size, dtype=torch.float64).view(-1, 3)
    return fully_shard(net, group=group, **options), twin, x[group.rank : group.rank + 1], x


def assert_equal_gradients(net, twin):
    wanted = dict(twin.named_parameters())
    for name, parameter, _ in marks(net):
        other = wanted[name].grad
        assert (parameter.grad is None) == (other is None), name
        if other is not None:
            gradient = whole_tensor(parameter.grad, ())
            torch.testing.assert_close(gradient, other, rtol=0, atol=1e-12, msg=name)


@ranks(2)
def test_a_parameter_that_some_rank_used_has_a_gradient_and_one_that_none_used_has_not():
    net, twin, own_x, x = sharded()
    for who in (1, None, 0):
        net.zero_grad()
        twin.zero_grad()
        rank = int(own_x[0, 0] != 0)
        net(own_x, spare=rank == who).sum().backward()
        for other in range(2):
            (twin(x[other : other + 1], spare=other == who).sum() / 2).backward()
        assert (net.spare.weight.grad is None) == (who is None)
        assert_equal_gradients(net, twin)


@ranks(2)
def test_used_in_an_earlier_micro_batch_is_used():
    net, twin, own_x, x = sharded()
    with no_sync(net):
        net(own_x, spare=own_x[0, 0] == 0).sum().backward()
    net(own_x).sum().backward()
    for other in range(2):
        (twin(x[other : other + 1], spare=other == 0).sum() / 2).backward()
        (twin(x[other : other + 1]).sum() / 2).backward()
    assert_equal_gradients(net, twin)


@ranks(2)
def test_several_backwards_add_up_and_a_gradient_is_kept_when_its_parameter_is_idle():
    net, twin, own_x, x = sharded()
    for spare in (True, False, True):
        net(own_x, spare=spare).sum().backward()
        (twin(x, spare=spare).sum() / 2).backward()
        assert_equal_gradients(net, twin)
    first, second = net(own_x).sum(), net(own_x, spare=True).sum()
    first.backward()
    second.backward()
    (twin(x).sum() / 2 + twin(x, spare=True).sum() / 2).backward()
    assert_equal_gradients(net, twin)


@ranks(2)
def test_weights_that_changed_after_any_forward_pass_are_seen():
    net, twin, own_x, x = sharded()

    def evaluate():
        with torch.no_grad():
            net(own_x)

    def forward_without_backward():
        net(own_x)

    def unshard():
        net.unshard()
        net.layers[0].unshard(async_op=True)

    for leave in (evaluate, forward_without_backward, unshard):
        leave()
        net.state_dict()  # registers the slices
        for module in (net, twin):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1.5)
        torch.testing.assert_close(net(own_x), twin(own_x), rtol=0, atol=1e-12)


@ranks(2)
def test_after_evaluation_the_module_holds_its_slices():
    net, _, own_x, _ = sharded()
    held = [id(parameter) for parameter in net.parameters()]
    with torch.no_grad():
        net(own_x)
    assert [id(parameter) for parameter in net.parameters()] == held


@ranks(2)
@pytest.mark.parametrize("where", ["forward", "between"])
def test_an_exception_before_backward_costs_nothing(where):
    net, twin, own_x, x = sharded()
    net(own_x).sum().backward()
    net.zero_grad()
    with pytest.raises(ArithmeticError):
        net(own_x, fails="forward" if where == "forward" else "").sum()
        raise ArithmeticError
    net(own_x).sum().backward()
    (twin(x).sum() / 2).backward()
    assert_equal_gradients(net, twin)


@ranks(2)
def test_a_backward_that_broke_off_makes_the_next_step_raise_until_all_ranks_begin_anew():
    net, twin, own_x, x = sharded()
    with pytest.raises(ArithmeticError, match="backward"):
        net(own_x, fails="backward").sum().backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the last backward pass broke off"):
            net(own_x)
    net.reset_iter_state()
    net.zero_grad()
    net(own_x).sum().backward()
    (twin(x).sum() / 2).backward()
    assert_equal_gradients(net, twin)


@ranks(2)
def test_a_rank_that_raises_in_backward_ends_the_others_in_time():
    group = Mesh(timeout=timedelta(seconds=2)).group("dp")
    torch.manual_seed(0)
    net = fully_shard(Net(), group=group)
    x = torch.ones(1, 3)
    net(x).sum().backward()
    error = ArithmeticError if group.rank == 1 else RuntimeError
    start = time.monotonic()
    with pytest.raises(error):
        net(x, fails="backward" if group.rank == 1 else "").sum().backward()
    assert time.monotonic() - start < 30


@ranks(2)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_rank_that_leaves_out_a_pass_is_suspected_by_the_others(part):
    group = Mesh(timeout=timedelta(seconds=2)).group("dp")
    torch.manual_seed(0)
    net = fully_shard(Net(), group=group)
    x = torch.ones(1, 3)
    net(x).sum().backward()
    if group.rank == 1:
        if part == "backward":
            net(x)
        return
    words = r"(unit .layers.\d.|the root unit) did not arrive over the ranks \[0, 1\]: a rank"
    with pytest.raises(RuntimeError, match=words):
        net(x).sum().backward()


@ranks(2)
def test_no_sync_may_stand_in_another_and_around_what_holds_the_module():
    net, twin, own_x, x = sharded()
    outer = nn.ModuleDict({"net": net})
    with no_sync(outer):
        with no_sync(net):
            net(own_x).sum().backward()
        net(own_x).sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    net(own_x).sum().backward()
    (3 * twin(x).sum() / 2).backward()
    assert_equal_gradients(net, twin)


@ranks(2)
def test_parameters_that_came_later_are_refused_by_name():
    net, _, own_x, _ = sharded()
    net(own_x).sum().backward()
    net.layers[0].adapter = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"\['layers.0.adapter.weight', .*'\] were added after"):
        net(own_x)
    del net.layers[0].adapter
    net(own_x).sum().backward()


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_frozen_then_unfrozen(dtype):
    net, twin, own_x, x = sharded()
    net, twin, own_x, x = net.to(dtype), twin.to(dtype), own_x.to(dtype), x.to(dtype)
    for module in (net, twin):
        module.layers[0].requires_grad_(False)
        module.head.bias.requires_grad_(False)
    for frozen in (True, False):
        for module in (net, twin):
            module.zero_grad()
            module.layers[0].requires_grad_(not frozen)
        net(own_x).sum().backward()
        (twin(x).sum() / 2).backward()
        assert net.head.bias.grad is None
        assert (net.layers[0].weight.grad is None) is frozen
        if dtype is torch.float64:
            assert_equal_gradients(net, twin)
        elif not frozen:
            assert net.layers[0].weight.grad.dtype == dtype


@ranks(2)
def test_unfrozen_under_a_policy_gradients_are_as_wide_as_their_parameters():
    net, _, own_x, _ = sharded(precision=PrecisionPolicy())
    net.layers[0].requires_grad_(False)
    net(own_x).sum().backward()
    net.layers[0].requires_grad_(True)
    net(own_x).sum().backward()
    assert net.layers[0].weight.grad.dtype == net.layers[0].weight.dtype


class Alone(nn.Module):
    """A dense layer and an expert that no other rank holds."""

    dense: Any
    expert: Any

    def __init__(self, group):
        super().__init__()
        self.dense = nn.Linear(1, 1, bias=False)
        self.expert = nn.Parameter(torch.ones(1))
        mark(self, "expert", ShardSpec(0, group), expert=True)

    def forward(self, x):
        return self.dense(x) + self.expert


@ranks(4)
@pytest.mark.parametrize("meta", [False, True])
def test_f053_what_lies_on_one_rank_is_scaled_once_in_each_micro_batch(meta):
    group = Mesh(ep=4).group("dp")
    with torch.device("meta" if meta else "cpu"):
        net = Alone(group)
    fully_shard(net, group=group, expert_group=LOCAL)
    net.to_empty(device="cpu")
    for micro in range(4):
        with no_sync(net):
            net(torch.ones(1)).sum().backward()
        torch.testing.assert_close(net.expert.grad, torch.tensor([(micro + 1) / 4]))
    net(torch.ones(1)).sum().backward()
    assert net.expert.grad.item() == 5 / 4
    assert net.dense.weight.grad.full_tensor().item() == 5.0


@ranks(2)
def test_over_one_rank_the_module_is_left_alone():
    net = Net()
    before = {name: id(parameter) for name, parameter in net.named_parameters()}
    assert fully_shard(net, group=LOCAL) is net
    assert type(net) is Net and not net._forward_hooks and not net._forward_pre_hooks
    assert {name: id(parameter) for name, parameter in net.named_parameters()} == before
    with no_sync(net):
        net(torch.ones(1, 3)).sum().backward()
    assert gather_whole(net)["head.bias"] is not None
