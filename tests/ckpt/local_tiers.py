"""A state that is cut over the ranks, and folders that stand for the disks of hosts."""

import shutil

import torch
from torch import nn

from megablocks_core import ckpt
from megablocks_core.groups import Segment, ShardSpec, chunk_slice, mark
from tests.ckpt.flat_optimizer import FlatAdam


class Net(nn.Module):
    """A matrix cut over the ranks, unevenly; another one and a number that all have."""

    def __init__(self, group, value, *, dim=0):
        super().__init__()
        shape = [7, 5]
        segments = (Segment(shape[dim]),)
        part = chunk_slice(shape[dim], group.size, group.rank)
        shape[dim] = part.stop - part.start
        self.rows = nn.Parameter(torch.full(shape, value + group.rank))
        self.norm = nn.Parameter(torch.full((6, 4), value).t())
        self.register_buffer("count", torch.tensor(int(value)))
        mark(self, "rows", ShardSpec(dim, group, segments))


def state_of(group, value, *, steps=1):
    """Everything in it depends on ``value``, and most of it on the rank."""
    net = Net(group, float(value))
    adam = torch.optim.AdamW([net.rows], lr=0.01)
    flat = FlatAdam([[net.norm]], group=group)
    for _ in range(steps):
        net.rows.grad, net.norm.grad = torch.ones_like(net.rows), torch.ones_like(net.norm)
        adam.step()
        flat.step()
    return {
        "net": net,
        "adam": adam,
        "flat": flat,
        "own": torch.full((3, 2), value + group.rank, dtype=torch.bfloat16),
        "rank": [group.rank, value],
    }


def assert_holds(group, state, value):
    """``state`` is, to the bit, ``state_of(group, value)``."""
    expected = state_of(group, value)
    for name, tensor in expected["net"].state_dict().items():
        assert torch.equal(state["net"].state_dict()[name], tensor), name
    saved = expected["adam"].state[expected["net"].rows]
    for name, tensor in state["adam"].state[state["net"].rows].items():
        assert torch.equal(tensor, saved[name]), name
    for name, tensor in state["flat"].state[0].items():
        assert torch.equal(tensor, expected["flat"].state[0][name]), name
    assert state["flat"].steps == 1
    assert torch.equal(state["own"], expected["own"])
    assert state["rank"] == [group.rank, value]


class Hosts:
    """Ranks on hosts, each with a folder of its own under ``root``.

    Args:
        root: The same on all ranks.
        names: The host of each rank.
        group: All ranks.
    """

    def __init__(self, root, names, group, **options):
        self.root, self.names, self.group, self.options = root, names, group, options

    def tier(self):
        """A new tier, as after a restart."""
        folder = self.root / self.names[self.group.rank]
        return ckpt.LocalTier(folder, group=self.group, hosts=self.names, **self.options)

    def lose(self, *names):
        """What lies on some hosts is gone."""
        self.alone(lambda: [shutil.rmtree(self.root / name) for name in names])

    def alone(self, action):
        """The first rank does something while no other does anything."""
        self.group.barrier()
        if self.group.rank == 0:
            action()
        self.group.barrier()

    def parts(self, name, step="*", rank="*"):
        """The folders of parts on a host."""
        return sorted((self.root / name).glob(f"step-{step}.*.{rank}-of-*"))
