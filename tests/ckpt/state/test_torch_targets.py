"""What a torch optimizer's state is filled into, and what its groups become."""

import pytest
import torch
from torch import nn

from megablocks_core.ckpt.manifest import Manifest, StoredAs
from megablocks_core.ckpt.state.optimizers import find_owners
from megablocks_core.ckpt.state.torch_targets import TorchTarget
from megablocks_core.groups import LOCAL, ShardSpec, mark


def _target(module, optimizer, groups, tensors=None, numbers=None):
    saved = {
        "param_groups": [{"names": names, "values": {"lr": lr}} for names, lr in groups],
        "state": numbers or {},
    }
    stored = {name: StoredAs("F32", shape, []) for name, shape in (tensors or {}).items()}
    manifest = Manifest(0, {}, stored)
    return TorchTarget("o", optimizer, saved, manifest, find_owners({"m": module}), LOCAL)


def test_tensors_that_fit_are_filled_in_place_and_others_made():
    module = nn.Linear(2, 3)
    sgd = torch.optim.SGD(module.parameters(), momentum=0.5)
    own = torch.ones(3, 2)
    sgd.state[module.weight] = {"momentum_buffer": own}
    names = {"o/m/weight/momentum_buffer": (3, 2), "o/m/bias/momentum_buffer": (3,)}
    target = _target(module, sgd, [(["m/weight", "m/bias"], 0.25)], names, {"m/bias": {"n": 7}})
    assert [share.name for share in target.shares] == list(names)
    for number, share in enumerate(target.shares):
        share.pieces[0].view.fill_(number + 5)
    target.finish()
    assert (own == 5).all() and sgd.state[module.weight]["momentum_buffer"] is own
    assert sgd.state[module.bias]["momentum_buffer"].tolist() == [6, 6, 6]
    assert sgd.state[module.bias]["n"] == 7 and sgd.param_groups[0]["lr"] == 0.25
    assert (target.missing, target.faults) == ([], [])
    assert target.asked == {"o/m/weight", "o/m/bias"}


def test_groups_are_matched_by_name_in_any_order():
    module = nn.Linear(2, 3)
    sgd = torch.optim.SGD([{"params": [module.bias]}, {"params": [module.weight]}])
    target = _target(module, sgd, [(["m/weight", "m/x"], 0.25), (["m/bias"], 0.5)])
    target.finish()
    assert [group["lr"] for group in sgd.param_groups] == [0.5, 0.25]
    assert target.faults == [] and target.asked == {"o/m/weight", "o/m/bias"}


def test_a_parameter_of_which_nothing_is_known_keeps_its_hyperparameters():
    module = nn.Linear(2, 3)
    sgd = torch.optim.SGD([{"params": [module.bias], "lr": 0.125}, {"params": [module.weight]}])
    target = _target(module, sgd, [(["m/weight"], 0.25)])
    target.finish()
    assert target.missing == ["o/m/bias"] and target.faults == []
    assert [group["lr"] for group in sgd.param_groups] == [0.125, 0.25]


def test_groups_that_were_split_or_joined_are_faults():
    module = nn.Linear(2, 3)
    split = torch.optim.SGD([{"params": [module.bias]}, {"params": [module.weight]}])
    (fault,) = _target(module, split, [(["m/weight", "m/bias"], 0.25)]).faults
    assert fault == "o has two parameter groups, 0 and 1, of what was saved as one"
    joined = torch.optim.SGD(module.parameters())
    (fault,) = _target(module, joined, [(["m/bias"], 0.5), (["m/weight"], 0.25)]).faults
    assert fault.startswith("o has one parameter group, 0, of what was saved as several")


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 3))
        mark(self, "up", ShardSpec(0, LOCAL), each="experts.{}.up", expert=True)


def test_a_stack_has_one_step_which_all_in_it_agree_on():
    module = nn.ModuleDict({"experts": _Experts()})
    adam = torch.optim.Adam(module.parameters())
    names = ["m/experts.0.up", "m/experts.1.up"]
    tensors = {f"o/{name}/step": () for name in names}
    for steps, agree in (([4.0, 4.0], True), ([4.0, 5.0], False)):
        target = _target(module, adam, [(names, 0.5)], tensors)
        assert [share.name for share in target.shares] == list(tensors)
        for share, step in zip(target.shares, steps, strict=True):
            share.view(()).fill_(step)
        if agree:
            target.finish()
            assert adam.state[module["experts"].up]["step"] == 4
        else:
            with pytest.raises(ValueError, match="o/m/experts.up/step must be one number for all"):
                target.finish()
