"""Optimizer state is named by parameter, and merged over the ranks that hold parameters."""

import copy

import pytest
import torch
from torch import nn

from megablocks_core.ckpt.state.optimizers import find_owners, merge_optimizer, optimizer_entry
from megablocks_core.groups import LOCAL, ShardSpec, mark
from tests.ckpt.flat_optimizer import FlatAdam


def _entry(module, optimizer):
    shares, value = optimizer_entry("o", optimizer, find_owners({"m": module}), LOCAL)
    return {share.name: share for share in shares}, value


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 3, 4))
        mark(self, "up", ShardSpec(0, LOCAL), each="experts.{}.up.weight", expert=True)


def test_a_stack_has_a_field_and_a_step_for_each_expert():
    module = nn.ModuleDict({"experts": _Experts()})
    adam = torch.optim.Adam(module.parameters())
    module["experts"].up.grad = torch.ones(2, 3, 4)
    adam.step()
    shares, value = _entry(module, adam)
    names = ["m/experts.0.up.weight", "m/experts.1.up.weight"]
    assert value["param_groups"][0]["names"] == names
    assert set(shares) == {
        f"o/{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert shares["o/m/experts.1.up.weight/exp_avg"].shape == (3, 4)
    assert shares["o/m/experts.1.up.weight/step"].shape == ()


def test_numbers_that_are_no_tensors_go_to_the_manifest():
    module = nn.Linear(2, 2, bias=False)
    sgd = torch.optim.SGD(module.parameters())
    sgd.state[module.weight] = {"count": 3, "scale": 2.0**-1074}
    shares, value = _entry(module, sgd)
    assert shares == {} and value["state"] == {"m/weight": {"count": 3, "scale": 2.0**-1074}}
    sgd.state[module.weight] = {"pair": (1, 2)}
    with pytest.raises(ValueError, match="o/m/weight/pair of type tuple"):
        _entry(module, sgd)


def test_published_state_is_taken_by_parameter():
    module = nn.Linear(2, 3)
    shares, value = _entry(module, FlatAdam([[module.bias, module.weight]]))
    assert value == {"values": {"lr": 0.01, "steps": 0}}
    assert [box for box, _ in shares["o/m/weight/master"].pieces] == [(slice(0, 3), slice(0, 2))]
    assert torch.equal(shares["o/m/bias/master"].pieces[0].view, module.bias)
    with pytest.raises(ValueError, match=r"state\['o'\] optimises a parameter of shape \(2,\)"):
        _entry(module, FlatAdam([[nn.Parameter(torch.ones(2))]]))


def _value(names, values, **state):
    return {"param_groups": [{"names": names, "values": values}], "state": state}


def test_values_of_ranks_with_other_parameters_are_merged():
    first, second = _value(["a", "b"], {"lr": 1}, b={"n": 1}), _value(["b", "c"], {"lr": 1}, c={})
    before = copy.deepcopy((first, second))
    assert merge_optimizer("o", [first, second]) == _value(
        ["a", "b", "c"], {"lr": 1}, b={"n": 1}, c={}
    )
    assert (first, second) == before


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (_value(["b"], {"lr": 2}), r"param_groups\[0\] must be equal on all ranks: rank 1 has"),
        (_value(["b"], {"lr": 1}, a={"n": 2}), r"state\['a'\] must be equal on all ranks"),
        ({"param_groups": [], "state": {}}, "must have as many parameter groups on all ranks"),
    ],
)
def test_ranks_that_differ_are_refused(second, message):
    with pytest.raises(ValueError, match=message):
        merge_optimizer("o", [_value(["a"], {"lr": 1}, a={"n": 1}), second])


def test_a_parameter_is_in_one_group():
    pair = [{"names": [], "values": {}}, {"names": ["a"], "values": {}}]
    values = [{"param_groups": groups, "state": {}} for groups in (pair, pair[::-1])]
    with pytest.raises(ValueError, match="a must be in one parameter group: it is in 1 and"):
        merge_optimizer("o", values)
