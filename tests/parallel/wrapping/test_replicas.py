"""Ranks that hold other parameters than the rest are found."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import LOCAL, Group, Mesh, mark, marks
from megablocks_core.parallel.wrapping.replicas import check_replicas
from megablocks_core.testing import ranks


def _world():
    return Group.of(dist.group.WORLD)


def _module(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.ModuleDict({"one": nn.Linear(3, 2), "two": nn.Linear(2, 2)}).to(dtype)


def _check(module, **options):
    groups = {"group": _world(), "expert_group": LOCAL, **options}
    check_replicas(list(marks(module)), **groups)


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_the_same_parameters_pass(dtype):
    _check(_module(dtype))


CHANGES = {
    "one.bias.*sum of bits": lambda module: module["one"].bias.data[1].mul_(1.0001),
    "two.weight.*requires_grad": lambda module: module["two"].weight.requires_grad_(False),
    "two.weight.*dtype": lambda module: module["two"].bfloat16(),
    "one.weight.*shape": lambda module: module.update({"one": nn.Linear(4, 2)}),
    "name|same parameters": lambda module: module.pop("two"),
}


@ranks(2)
@pytest.mark.parametrize("words", CHANGES)
def test_a_difference_is_named_on_all_ranks(words):
    module = _module()
    if _world().rank == 1:
        CHANGES[words](module)
    with pytest.raises(ValueError, match=words):
        _check(module)


@ranks(2)
def test_values_are_compared_if_asked_and_there():
    module = _module()
    module["one"].weight.data.fill_(_world().rank)
    _check(module, values=False)
    _check(_module().to("meta"))


@ranks(4)
def test_experts_are_compared_with_their_copies_alone():
    mesh = Mesh(dp=4, ep=2)
    module = _module()
    mark(module["two"], "weight", expert=True)
    module["two"].weight.data.fill_(mesh.expert.group("ep").rank)
    copies = mesh.expert.group("edp")
    _check(module, expert_group=copies)
    module["two"].weight.data.fill_(copies.rank)
    with pytest.raises(ValueError, match=r"two\.weight"):
        _check(module, expert_group=copies)
