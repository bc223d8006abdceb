"""Every change of a module's parameters is seen, and nothing else."""

import pytest
import torch
from torch import nn

from megablocks_core.parallel.data_parallel.parameter_watch import ParameterWatch


def _module():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.GELU()))


CHANGES = {
    "frozen": lambda module: module[0].weight.requires_grad_(False),
    "another dtype": lambda module: module.bfloat16(),
    "a parameter more": lambda module: module[1].register_parameter("new", module[0].bias),
    "a module more": lambda module: module.append(nn.Linear(1, 1)),
    "another module deep inside": lambda module: module[1].__setitem__(0, nn.Linear(2, 2)),
    "another parameter": lambda module: setattr(module[0], "bias", nn.Parameter(torch.ones(2))),
    "loaded by assignment": lambda module: module.load_state_dict(
        _module().state_dict(), assign=True
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change):
    module = _module()
    watch = ParameterWatch(module)
    assert not watch.has_changed()
    change(module)
    assert watch.has_changed()


def test_another_device_is_seen():
    class Elsewhere(nn.Parameter):  # as if there was a GPU: ``to`` keeps the object
        device = torch.device("cpu")

    module = _module()
    module[0].bias = Elsewhere(torch.ones(2))
    watch = ParameterWatch(module)
    assert not watch.has_changed()
    Elsewhere.device = torch.device("cuda", 0)
    assert watch.has_changed()


def test_training_is_no_change():
    module = _module()
    watch = ParameterWatch(module)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    module.eval()
    module.load_state_dict(_module().state_dict())
    assert not watch.has_changed()
