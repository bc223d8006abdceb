"""Save and load need little memory beside the state, by the resident size of each rank."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from megablocks_core import ckpt
from megablocks_core.groups import Mesh, ShardSpec, mark
from megablocks_core.testing import ranks

MB = 2**20


def _resident(what):
    return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def _extra(action):
    """How much the resident size grew at most while ``action`` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _resident("VmRSS")
    action()
    return _resident("VmHWM") - before


class Net(nn.Module):
    """Matrices of 32 MiB and one of 192 MiB, cut along a dimension."""

    def __init__(self, count, dim, group, value):
        super().__init__()
        for number in range(count + 1):
            shape = [2048, 4096 if number else 6 * 4096]
            shape[dim] //= group.size
            self.register_parameter(f"w{number}", nn.Parameter(torch.full(shape, value)))
            mark(self, f"w{number}", ShardSpec(dim, group))


def _check(path, count):
    """``count`` matrices and one moment of each, saved cut by rows, loaded cut by columns."""
    world = Mesh().group("dp")
    largest = 192 * MB

    def state(dim, value):
        net = Net(count, dim, world, value)
        sgd = torch.optim.SGD(net.parameters(), momentum=0.9)
        for one in net.parameters():
            sgd.state[one] = {"momentum_buffer": torch.full_like(one, -value)}
        return {"model": net, "optimizer": sgd}

    warm_up = {"x": torch.ones(5)}
    ckpt.save(path / "warm-up" / "a", warm_up, group=world)
    ckpt.load(path / "warm-up" / "a", warm_up, group=world)
    mine = state(0, 1.0)
    saved = _extra(lambda: ckpt.save(path / "a", mine, group=world))
    del mine
    mine = state(1, 2.0)
    loaded = _extra(lambda: ckpt.load(path / "a", mine, group=world))
    for one in mine["model"].parameters():
        assert (one == 1).all()
        assert (mine["optimizer"].state[one]["momentum_buffer"] == -1).all()
    print(f"extra: save {saved / MB:.0f} MB, load {loaded / MB:.0f} MB")
    assert saved < 256 * MB + largest * (world.size > 1)
    assert loaded < 256 * MB


@ranks(1, 2)
def test_extra_memory_of_a_state_of_half_a_gigabyte(tmp_path):
    _check(tmp_path, 2)


@pytest.mark.slow
@ranks(1, 2, timeout=900)
def test_extra_memory_of_a_state_of_four_gigabytes(tmp_path):
    _check(tmp_path, 58)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("copies", [0, 1])
def test_extra_memory_of_a_save_on_the_hosts(tmp_path, copies):
    world = Mesh().group("dp")
    folder = tmp_path / str(world.rank)
    tier = ckpt.LocalTier(folder, group=world, hosts=["a", "b"], copies=copies)
    state = {"net": Net(3, 0, world, 1.0)}
    tier.save(1, {"x": torch.ones(5)})
    saved = _extra(lambda: tier.save(2, state))
    if copies:
        world.barrier()
        for part in (tmp_path / "0").iterdir():
            (part / "manifest.json").unlink(missing_ok=True)
        world.barrier()
    loaded = _extra(lambda: tier.load_newest(state))
    print(f"extra: save {saved / MB:.0f} MB, load {loaded / MB:.0f} MB")
    assert max(saved, loaded) < 256 * MB
