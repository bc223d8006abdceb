"""Parameters of one kind travel together; what cannot travel is refused by name."""

import pytest
import torch
from torch import nn

from megablocks_core.groups import LOCAL, ShardSpec, mark
from megablocks_core.parallel.fsdp.parts import plan_parts, plan_reshards, refuse
from megablocks_core.parallel.fsdp.precision import AS_THEY_ARE, PrecisionPolicy, widen_kept
from megablocks_core.parallel.fsdp.units import plan_units


class Net(nn.Module):
    """Two blocks with a small decay and an expert each, and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        for layer in self.layers:
            layer.decay = nn.Parameter(torch.zeros(4))
            layer.expert = nn.Parameter(torch.zeros(2, 3))
            mark(layer, "expert", ShardSpec(0, LOCAL), expert=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return x


def kinds(net, policy):
    """For each unit, the names of its parts."""
    units = plan_units(net, None)
    names = {id(p): name for name, p in net.named_parameters()}
    parts = plan_parts(net, units, policy, widen_kept(net, policy))
    return [[[names[id(p)] for p in part.parameters()] for part in own] for own in parts]


def test_experts_stay_in_their_unit_and_all_else_is_one_part():
    first, second, root = kinds(Net(), AS_THEY_ARE)
    assert first == [["layers.0.weight", "layers.0.bias", "layers.0.decay"], ["layers.0.expert"]]
    assert second[1] == ["layers.1.expert"]
    assert root == [["head.weight", "head.bias"]]


def test_the_few_of_another_dtype_travel_with_the_root():
    policy = PrecisionPolicy(keep_float32=("decay",))
    first, _, root = kinds(Net(), policy)
    assert first == [["layers.0.weight", "layers.0.bias"], ["layers.0.expert"]]
    assert root == [["head.weight", "head.bias"], ["layers.0.decay", "layers.1.decay"]]


def test_many_of_another_dtype_are_a_part_of_their_unit():
    net = Net()
    net.layers[0].decay = nn.Parameter(torch.zeros(64, dtype=torch.float64))
    first, *_ = kinds(net, AS_THEY_ARE)
    assert ["layers.0.decay"] in first


def test_kinds_say_the_dtypes():
    net = Net().bfloat16()
    policy = PrecisionPolicy(params=None, keep_float32=("decay",))
    parts = plan_parts(net, plan_units(net, None), policy, widen_kept(net, policy))
    bf16, f32 = torch.bfloat16, torch.float32
    assert parts[0][0].kind == (False, bf16, bf16, f32)
    assert parts[-1][1].kind == (False, f32, f32, f32)
    assert parts[0][1].kind == (True, bf16, bf16, f32)


def test_whether_units_are_freed_goes_by_their_names():
    units = plan_units(Net(), None)
    assert plan_reshards(units, True) == [True] * 3
    assert plan_reshards(units, False) == [False] * 3
    assert plan_reshards(units, {"layers.*": False, "layers.0": True}) == [True, False, True]
    with pytest.raises(ValueError, match=r"\['blocks.0'\] match none of the units .*layers.0"):
        plan_reshards(units, {"blocks.0": True})
    with pytest.raises(ValueError, match="reshard=2 must be a bool, or patterns"):
        plan_reshards(units, 2)
    with pytest.raises(ValueError, match="must be a bool, or patterns with a bool each"):
        plan_reshards(units, {"layers.0": 2})


def test_what_cannot_be_served_is_named():
    net = Net()
    refuse(net)
    net.gain = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"'gain' is a scalar.*shape \(1,\)"):
        refuse(net)
    net.gain = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="'gain' is complex"):
        refuse(net)
    net.gain = nn.Parameter(torch.ones(2, 3).T)
    with pytest.raises(ValueError, match=r"'gain' with strides \(1, 3\) must be contiguous"):
        refuse(net)
    net.gain = nn.Parameter(torch.ones(0, 3))
    with pytest.raises(ValueError, match="'gain' has no element"):
        refuse(net)
