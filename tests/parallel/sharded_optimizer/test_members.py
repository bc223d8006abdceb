"""Whom an optimizer trains, and what it refuses."""

import pytest
import torch
from torch import nn

from megablocks_core.groups import LOCAL, ShardSpec, mark
from megablocks_core.parallel.sharded_optimizer.members import (
    check_complete,
    described,
    find_members,
)


def _net():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 3))
    net[2].weight = net[0].weight  # tied
    net[1].bias.requires_grad_(False)
    mark(net[1], "weight", ShardSpec(0, LOCAL), expert=True)
    return net


def test_a_module_gives_each_trained_parameter_once_with_its_mark():
    net = _net()
    members, groups = find_members(net, None)
    assert [one.name for one in members] == ["0.weight", "0.bias", "1.weight", "2.bias"]
    assert [one.specs.expert for one in members] == [False, False, True, False]
    assert [len(group["params"]) for group in groups] == [4]
    assert [one.expert for one in described(members)] == [False, False, True, False]


def test_groups_divide_a_module_whose_order_stays():
    net = _net()
    groups = [
        {"params": [net[2].bias, net[0].weight], "lr": 1.0},
        {"params": iter([net[1].weight, net[0].bias])},
    ]
    members, wanted = find_members(net, groups)
    assert [(one.name, one.home) for one in members] == [
        ("0.weight", 0),
        ("0.bias", 1),
        ("1.weight", 1),
        ("2.bias", 0),
    ]
    assert wanted[0]["lr"] == 1.0 and wanted[0]["params"] == [net[2].bias, net[0].weight]


def test_parameters_come_in_all_of_torchs_ways():
    net = nn.Linear(2, 3)
    ways = [
        net.parameters(),
        [{"params": [net.weight]}, {"params": net.bias}],
        net.named_parameters(),
        [{"params": list(net.parameters()), "param_names": ["weight", "bias"]}],
    ]
    names = [[one.name for one in find_members(way, None)[0]] for way in ways]
    assert names == [["0", "1"], ["0", "1"], ["weight", "bias"], ["weight", "bias"]]


def test_what_is_no_set_of_parameters_is_refused():
    net = _net()
    other = nn.Parameter(torch.ones(2))
    trained = [p for p in net.parameters() if p.requires_grad]
    for given, groups, text in (
        (net, [{"params": trained[:-1]}], r"\['2.bias'\] must be in a parameter group"),
        (net, [{"params": [*trained, other]}], r"groups\[0\] must hold the module's"),
        (net, [{"params": trained}, {"params": trained[:1]}], "'0.weight' must be in one"),
        (net.parameters(), [{"params": trained}], "groups must be None"),
        ([], None, "must have a parameter"),
        (nn.ReLU(), None, "must have a parameter"),
        (other, None, "no tensor"),
        ([other, other], None, "must be in one parameter group, and once"),
        ([other.detach()], None, "must require a gradient"),
        (nn.Linear(2, 2, device="meta"), None, "'weight' of .* on meta"),
        ([nn.Parameter(torch.ones(2, dtype=torch.complex64))], None, "complex64"),
        ([nn.Parameter(other.data), nn.Parameter(other.data[1:])], None, "must not share memory"),
    ):
        with pytest.raises(ValueError, match=text):
            find_members(given, groups)


def test_a_parameter_that_comes_later_is_named():
    net = _net()
    members, _ = find_members(net, None)
    check_complete(net, members)
    net[1].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"\['1.bias'\]"):
        check_complete(net, members)
    net[1].bias.requires_grad_(False)
    net[0].weight = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"\['0.weight'\]"):
        check_complete(net, members)
