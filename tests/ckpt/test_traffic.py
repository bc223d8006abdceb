"""What save and load send, counted, is what docs/traffic.md says."""

from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch import nn

from megablocks_core import ckpt
from megablocks_core.ckpt.loading import loading
from megablocks_core.ckpt.transfer import exchange, windows
from megablocks_core.groups import Group, Mesh, ShardSpec, mark
from megablocks_core.groups.swaps import on_any, swap
from megablocks_core.testing import ranks
from tests.ckpt.transfer.test_windows import on_hosts


class _Counts:
    """Counts small messages, and bytes from rank to rank, while it is entered."""

    def __enter__(self):
        self.small = self.sent = self.rounds = 0
        self._patches = ExitStack()
        for name in ("all_gather_object", "broadcast_object"):
            call = self._counted(getattr(Group, name))
            self._patches.enter_context(patch.object(Group, name, call))
        self._patches.enter_context(patch.object(exchange, "swap", self._swap))
        for module in (loading, windows):
            self._patches.enter_context(patch.object(module, "on_any", self._on_any))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def _counted(self, call):
        def counted(group, *values):
            self.small += 1
            return call(group, *values)

        return counted

    def _on_any(self, flag, *, group):
        self.small += 1
        return on_any(flag, group=group)

    def _swap(self, outgoing, incoming, *, group):
        self.rounds += 1
        self.sent += sum(one.nbytes for one in outgoing.values())
        return swap(outgoing, incoming, group=group)


def _net(dim, group, shape=(64, 1024)):
    net = nn.Module()
    for name in "abcd":
        size = list(shape)
        size[dim] //= group.size
        setattr(net, name, nn.Parameter(torch.zeros(size)))
        mark(net, name, ShardSpec(dim, group))
    return net


@ranks(2, 4)
def test_messages_of_a_save_and_a_load(tmp_path):
    world = Mesh().group("dp")
    size = world.size
    net, nbytes = _net(0, world), 4 * 64 * 1024 * 4
    sgd = torch.optim.SGD(net.parameters(), momentum=0.9)
    for one in net.parameters():
        sgd.state[one] = {"momentum_buffer": torch.zeros_like(one)}
    state = {"model": net, "optimizer": sgd, "step": 1}
    with _Counts() as save:
        ckpt.save(tmp_path / "a", state, group=world)
    state["model"] = net = _net(1, world)
    state["optimizer"] = torch.optim.SGD(net.parameters(), momentum=0.9)
    with _Counts() as load:
        ckpt.load(tmp_path / "a", state, group=world)
    with _Counts() as apart, on_hosts("abcd"):
        ckpt.load(tmp_path / "a", state, group=world)
    counts = world.all_gather_object((save.sent, load.sent, apart.sent))
    sent = [sum(each) for each in zip(*counts, strict=True)]
    # Of what is brought together, a writer holds 1 / size itself. Blocks hold rows of all columns.
    assert sent[0] == nbytes * (size - 1) / size
    assert sent[1] == 0 and 0 < sent[2] <= 2 * nbytes * (size - 1) / size
    assert (save.rounds, load.rounds, apart.rounds) == (1, 1, 1)
    assert (save.small, load.small, apart.small) == (1 + 13, 1 + 3, 1 + 2)
