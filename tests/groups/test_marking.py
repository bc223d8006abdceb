"""Marks survive what happens to modules, and name parameters by their logical names."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from megablocks_core.groups import (
    Group,
    Segment,
    ShardSpec,
    gather_whole,
    mark,
    marks,
    whole_tensor,
)
from megablocks_core.parallel import ColumnParallelLinear
from megablocks_core.testing import ranks


def _model(group):
    model = nn.Sequential(ColumnParallelLinear(4, 8, group=group), nn.LayerNorm(8))
    mark(model[1], "weight", expert=True, each="experts.{}.weight")
    return model


def _read(module):
    return [
        (
            name,
            [(spec.dim, spec.group.ranks, spec.segments) for spec in specs],
            specs.each,
            specs.expert,
        )
        for name, _, specs in marks(module)
    ]


def _saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _assigned(module):
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
    return module


def _averaged(module):
    return torch.optim.swa_utils.AveragedModel(module).module


class _Masters:
    """What optimizer wrappers do: step on float32 copies and put them back, by ``data``."""

    def __init__(self, module):
        self.held = list(module.parameters())
        self.copies = [nn.Parameter(parameter.detach().float()) for parameter in self.held]
        self.optimizer = torch.optim.SGD(self.copies, lr=0.5)

    def step(self):
        for held, copy_of in zip(self.held, self.copies, strict=True):
            copy_of.grad = None if held.grad is None else held.grad.float()
            held.grad = None
        self.optimizer.step()
        for held, copy_of in zip(self.held, self.copies, strict=True):
            held.data = copy_of.detach().to(held.dtype)


def _mastered(module):
    module.to(torch.bfloat16)
    masters = _Masters(module)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    masters.step()
    assert all(
        found is held for (_, found, _), held in zip(marks(module), masters.held, strict=True)
    )
    return module


@ranks(1, 2)
@pytest.mark.parametrize(
    "event",
    [
        "deepcopy",
        "pickle",
        "save",
        "to",
        "to_empty",
        "assign",
        "fsdp",
        "average",
        "masters",
        "compile",
    ],
)
def test_marks_survive(event):
    group = Group.of(dist.group.WORLD)
    model = _model(group)
    before = _read(model)
    happen = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda module: pickle.loads(pickle.dumps(module)),
        "save": _saved,
        "to": lambda module: module.to(torch.bfloat16),
        "to_empty": lambda module: module.to("meta").to_empty(device="cpu"),
        "assign": _assigned,
        "fsdp": lambda module: fully_shard(module),
        "average": _averaged,
        "masters": _mastered,
        "compile": torch.compile,
    }
    after = happen[event](model)
    assert _read(after) == before
    assert before[0] == ("0.weight", [(0, group.ranks, (Segment(8),))], None, False)
    assert before[2] == ("1.weight", [], "experts.{}.weight", True)


@ranks(1, 2)
def test_float32_masters_of_shares_are_the_shares_of_masters():
    """Steps on float32 copies of bf16 shares, put together by the marks, are one process's."""
    group = Group.of(dist.group.WORLD)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)).bfloat16()
    model = nn.Sequential(
        ColumnParallelLinear.from_linear(whole[0], gather_output=True, group=group),
        copy.deepcopy(whole[1]),
    )
    x = torch.randn(3, 4).bfloat16()
    parts = [(module, _Masters(module)) for module in (whole, model)]
    for _ in range(3):
        for module, masters in parts:
            module(x).float().square().sum().backward()
            masters.step()
    expected = dict(zip(whole.state_dict(), parts[0][1].copies, strict=True))
    for (name, _, specs), copy_of in zip(marks(model), parts[1][1].copies, strict=True):
        assert copy_of.dtype == torch.float32
        assert_close(whole_tensor(copy_of, specs), expected[name].detach(), atol=1e-2, rtol=1e-2)
    assert gather_whole(model)["0.weight"].dtype == torch.bfloat16


@ranks(2)
def test_names_are_free_of_wrappers():
    group = Group.of(dist.group.WORLD)
    inner = nn.Sequential(nn.Linear(2, 2))
    inner[0] = torch.compile(inner[0])
    model = nn.Module()
    model.module = inner  # a child that is really called "module" keeps its name
    names = [name for name, _, _ in marks(nn.parallel.DistributedDataParallel(model))]
    assert names == ["module.0.weight", "module.0.bias"]
    layer = ColumnParallelLinear(4, 8, group=group)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    found = {name: specs for name, _, specs in marks(layer)}
    assert set(found) == {"weight", "bias"} and found["weight"] == (layer.spec,)
    normed = nn.ModuleList([torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))])
    assert {id(one) for _, one, _ in marks(normed)} == {id(one) for one in normed.parameters()}
    assert [name for name, _, _ in marks(normed)] == [
        "0.bias",
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    ]


def test_a_tied_parameter_comes_once_with_its_mark():
    group = Group((0, 1))
    model = nn.ModuleDict({"head": nn.Linear(4, 8, bias=False), "embedding": nn.Embedding(8, 4)})
    model["embedding"].weight = model["head"].weight
    mark(model["embedding"], "weight", ShardSpec(0, group))
    assert [(name, specs) for name, _, specs in marks(model)] == [
        ("head.weight", (ShardSpec(0, group),))
    ]
    both = list(marks(model, remove_duplicate=False))
    assert [name for name, _, _ in both] == ["head.weight", "embedding.weight"]


def test_marks_that_cannot_be_raise():
    layer = nn.Linear(4, 8)
    with pytest.raises(ValueError, match="name='gain'"):
        mark(layer, "gain")
    with pytest.raises(ValueError, match="dim=1 must be below 1"):
        mark(layer, "bias", ShardSpec(1, Group((0, 1))))
    with pytest.raises(ValueError, match="exactly one"):
        mark(layer, "weight", each="experts.weight")


def test_a_second_mark_replaces_the_first():
    layer = nn.Linear(4, 8, bias=False)
    mark(layer, "weight", ShardSpec(0, Group((0, 1))))
    mark(layer, "weight")
    assert [specs for _, _, specs in marks(layer)] == [()]
