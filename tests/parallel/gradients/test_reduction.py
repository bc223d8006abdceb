"""Reduced gradients are those of one process that saw all tokens."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, Mesh, ShardSpec, mark
from megablocks_core.parallel.gradients.reduction import reduce_gradients
from megablocks_core.testing import ranks


def _world():
    return Group.of(dist.group.WORLD)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).double()


@ranks(1, 2, 4)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_equals_one_process_on_all_tokens(reduction):
    group = _world()
    x = torch.randn(group.size, 5, 6, dtype=torch.float64)
    model, whole = _model(), _model()
    model(x[group.rank]).square().sum().backward()
    whole(x).square().sum().backward()
    kept = [parameter.grad for parameter in model.parameters()]

    reduce_gradients(model, group=group, reduction=reduction)

    divisor = group.size if reduction == "mean" else 1
    for parameter, expected, before in zip(
        model.parameters(), whole.parameters(), kept, strict=True
    ):
        assert_close(parameter.grad, expected.grad / divisor, rtol=0, atol=1e-10)
        assert parameter.grad is before


@ranks(2, 4)
def test_a_gradient_on_any_rank_becomes_a_whole_one_on_every_rank():
    group = _world()
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("all", "one", "none")})
    model["frozen"] = nn.Linear(2, 2, bias=False).requires_grad_(False)
    model["all"].weight.grad = torch.full((2, 2), 1.0)
    if group.rank == 1:
        model["one"].weight.grad = torch.full((2, 2), 6.0)
    reduce_gradients(model, group=group)
    assert_close(model["all"].weight.grad, torch.ones(2, 2))
    assert_close(model["one"].weight.grad, torch.full((2, 2), 6.0 / group.size))
    assert model["none"].weight.grad is None
    assert model["frozen"].weight.grad is None


@ranks(4)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_expert_is_summed_over_its_copies_and_divided_by_all_ranks(reduction):
    mesh = Mesh(dp=4, ep=2)
    group, copies = mesh.group("dp"), mesh.expert.group("edp")
    model = nn.ModuleDict({"dense": nn.Linear(2, 2, bias=False), "expert": nn.Linear(2, 2)})
    mark(model["expert"], "weight", expert=True)
    mark(model["expert"], "bias", expert=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0**group.rank)
    reduce_gradients(model, group=group, expert_group=copies, reduction=reduction)
    divisor = 4 if reduction == "mean" else 1
    dense, expert = 15.0, float(sum(2**rank for rank in copies.ranks))
    assert_close(model["dense"].weight.grad, torch.full((2, 2), dense / divisor))
    assert_close(model["expert"].weight.grad, torch.full((2, 2), expert / divisor))
    assert_close(model["expert"].bias.grad, torch.full((2,), expert / divisor))


@ranks(2)
def test_an_expert_without_copies_is_only_divided():
    model = nn.Linear(2, 2, bias=False)
    mark(model, "weight", ShardSpec(0, _world()), expert=True)
    model.weight.grad = torch.full((2, 2), 3.0)
    reduce_gradients(model, group=_world(), expert_group=LOCAL)
    assert_close(model.weight.grad, torch.full((2, 2), 1.5))


@ranks(4)
def test_16_bit_gradients_are_summed_in_float32():
    group = _world()
    model = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    gradients = torch.randn(group.size, 16, 16).bfloat16()
    model.weight.grad = gradients[group.rank].clone()
    reduce_gradients(model, group=group)
    # Summed in bfloat16, in any order, some of them would be rounded twice.
    assert torch.equal(model.weight.grad, (gradients.float().sum(0) / group.size).bfloat16())


@ranks(2)
def test_it_sends_one_message_for_each_dtype_and_mark():
    group = _world()
    model = nn.ModuleList([nn.Linear(3, 3) for _ in range(6)])
    model[4].bfloat16()
    for name in ("weight", "bias"):
        mark(model[5], name, expert=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with CommDebugMode() as traffic:
        reduce_gradients(model, group=group, expert_group=group)
    assert traffic.get_total_counts() == 3


@ranks(2)
def test_a_sparse_gradient_is_named():
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="gradient of 'weight' must not be sparse"):
        reduce_gradients(embedding, group=_world())


@ranks(2)
def test_a_tied_parameter_is_reduced_once():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = model[0].weight
    model[0].weight.grad = torch.ones(2, 2)
    reduce_gradients(model, group=_world(), reduction="sum")
    assert_close(model[0].weight.grad, torch.full((2, 2), 2.0))


def test_another_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction='average' must be"):
        reduce_gradients(nn.Linear(1, 1), group=LOCAL, reduction="average")
