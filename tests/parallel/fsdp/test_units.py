"""Every parameter belongs to one unit, and no two units share one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megablocks_core.parallel.fsdp.units import plan_units


class Net(nn.Module):
    """An embedding, four blocks of two layers, a head."""

    layers: Any
    embed: Any
    head: Any

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(4)
        )
        self.head = nn.Linear(2, 4)

    def forward(self, x):
        return x


def paths(net, patterns=None):
    return {unit.paths for unit in plan_units(net, patterns)}


def owned(net, patterns=None):
    """Names of the parameters of each unit, by its first path."""
    names = {id(p): name for name, p in net.named_parameters()}
    return {
        unit.paths[0]: [names[id(owner._parameters[name])] for owner, name in unit.parameters]
        for unit in plan_units(net, patterns)
    }


def test_elements_of_lists_are_units_and_the_root_comes_last():
    net = Net()
    plan = plan_units(net, None)
    assert [unit.paths for unit in plan] == [(f"layers.{n}",) for n in range(4)] + [("",)]
    assert owned(net)[""] == ["embed.weight", "head.weight", "head.bias"]
    assert owned(net)["layers.1"] == [
        f"layers.1.{n}.{x}" for n in (0, 1) for x in ("weight", "bias")
    ]


def test_lists_of_lists_and_elements_without_parameters():
    net = Net()
    net.layers[1] = nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])
    assert paths(net) == {("layers.0",), ("layers.1.0",), ("layers.2",), ("layers.3",), ("",)}


def test_a_parameter_belongs_to_the_innermost_unit_that_patterns_name():
    found = owned(Net(), ["layers.*", "layers.2.0", "head"])
    assert found["layers.2"] == ["layers.2.1.weight", "layers.2.1.bias"]
    assert found["layers.2.0"] == ["layers.2.0.weight", "layers.2.0.bias"]
    assert found[""] == ["embed.weight"]


def test_units_that_share_a_parameter_are_one():
    net = Net()
    net.layers[0][1].weight = net.layers[2][0].weight
    net.layers[3][0].weight = net.layers[2][1].weight
    assert paths(net) == {("layers.0", "layers.2", "layers.3"), ("layers.1",), ("",)}


def test_a_unit_that_shares_with_the_root_becomes_part_of_it():
    net = Net()
    net.head.weight = net.embed.weight
    assert paths(net, ["head", "layers.*"]) == {(f"layers.{n}",) for n in range(4)} | {("",)}
    net.layers[1][0].weight = net.head.bias
    net.layers[1][1].weight = net.layers[2][0].weight
    assert paths(net, ["layers.*"]) == {("layers.0",), ("layers.3",), ("",)}


def test_a_unit_that_shares_with_one_inside_it_takes_it_in():
    net = Net()
    net.layers[1][0].weight = net.layers[1][1].weight
    assert paths(net, ["layers.*", "layers.1.0"]) == paths(net, ["layers.*"])
    assert len(owned(net, ["layers.*", "layers.1.0"])["layers.1"]) == 3


def test_one_module_in_two_places_is_one_unit():
    net = Net()
    net.layers[3] = net.layers[0]
    assert paths(net) == {("layers.0",), ("layers.1",), ("layers.2",), ("",)}
    net.layers[1][1] = net.layers[2][1]
    assert paths(net) == {("layers.0",), ("layers.1", "layers.2"), ("",)}


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=6), st.booleans())
def test_units_divide_the_parameters_however_they_are_tied(ties, inner):
    net = Net()
    linears = [layer for block in net.layers for layer in block]
    for first, second in ties:
        linears[first].weight = linears[second].weight
    plan = plan_units(net, ["layers.*", "layers.*.1"] if inner else None)
    ids = [[id(owner._parameters[name]) for owner, name in unit.parameters] for unit in plan]
    assert sorted(sum(ids, [])) == sorted({id(p) for p in net.parameters()})
    for unit, mine in zip(plan, ids, strict=True):
        reached = {id(p) for part in unit.modules for p in part.parameters()}
        assert set(mine) <= reached


def test_what_cannot_be_a_unit_is_refused():
    with pytest.raises(ValueError, match=r"no module's name matches \['blocks.\*'\]"):
        plan_units(Net(), ["blocks.*"])
    with pytest.raises(ValueError, match="unit 'layers' .ModuleList. must have a forward"):
        plan_units(Net(), ["layers"])
    with pytest.raises(ValueError, match="module .ModuleList. must have a forward"):
        plan_units(nn.ModuleList([nn.Linear(2, 2)]), None)


def test_names_are_those_without_wrappers():
    net = Net()
    wrapper = nn.Sequential()
    wrapper.add_module("_orig_mod", net.layers[0])  # as of torch.compile
    net.layers[0] = wrapper
    assert owned(net, ["layers.0"])["layers.0"] == [
        f"layers.0._orig_mod.{n}.{x}" for n in (0, 1) for x in ("weight", "bias")
    ]
