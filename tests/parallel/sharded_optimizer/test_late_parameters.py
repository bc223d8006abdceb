"""Whoever reads a late parameter waits, whichever way it comes; after that the dict is plain."""

import copy
import pickle

import pytest
import torch
from torch import nn

from megablocks_core.groups import marks
from megablocks_core.parallel.sharded_optimizer.late_parameters import LateParameters

READS = {
    "attribute": lambda m: m.weight,
    "getattr": lambda m: getattr(m, "weight"),  # noqa: B009
    "parameters": lambda m: list(m.parameters()),
    "named_parameters": lambda m: dict(m.named_parameters()),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.zeros(3, 2)}),
    "forward": lambda m: m(torch.zeros(2)),
    "functional_call": lambda m: torch.func.functional_call(m, {}, torch.zeros(2)),
    "marks": lambda m: list(marks(m)),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "get_parameter": lambda m: m.get_parameter("weight"),
    "to": lambda m: m.double(),
    "zero_grad": lambda m: m.zero_grad(),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "set": lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(3, 2))),
    "delete": lambda m: delattr(m, "weight"),
    "dict": lambda m: dict(m._parameters),
    "unpacked": lambda m: {**m._parameters},
    "values": lambda m: list(m._parameters.values()),
    "get": lambda m: m._parameters.get("weight"),
    "pop": lambda m: m._parameters.pop("weight"),
    "copy": lambda m: m._parameters.copy(),
    "merged": lambda m: m._parameters | {},
    "compared": lambda m: m._parameters == {},
    "shown": lambda m: repr(m._parameters),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_waits(read):
    waits = []
    module = nn.Linear(2, 3, bias=False)
    plain = module._parameters
    LateParameters(module, lambda: waits.append(None))
    READS[read](module)
    assert waits == [None]
    assert module._parameters is plain


def test_names_do_not_wait():
    module = nn.Sequential(nn.Linear(2, 3))
    late = LateParameters(module[0], pytest.fail)
    assert "weight" in late and "other" not in late
    assert (len(late), list(late), list(late.keys())) == (2, ["weight", "bias"], ["weight", "bias"])
    assert module[0] is not None  # names of submodules are not parameters
    assert hasattr(module, "0")


def test_code_that_reads_past_the_methods_finds_nothing():
    module = nn.Linear(2, 3)
    LateParameters(module, lambda: None)
    assert dict.__len__(module._parameters) == 0


def test_a_copy_has_a_plain_dict_of_its_own():
    module = nn.Linear(2, 3)
    LateParameters(module, lambda: None)
    other = copy.deepcopy(module)
    assert type(other._parameters) is dict
    assert other.weight is not module.weight
    assert torch.equal(other.weight, module.weight)
