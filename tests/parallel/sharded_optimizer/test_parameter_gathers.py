"""Updated weights arrive while others work, and nobody reads one that is not there yet."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import Group, gather_whole
from megablocks_core.parallel import ShardedOptimizer
from megablocks_core.testing import ranks


class _Net(nn.Module):
    """The head's weight is used without calling the head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5))
        self.head = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.body(x) @ self.head.weight.T


def _trained(group, steps, *, overlap, **options):
    torch.manual_seed(0)
    net = _Net().double()
    optimizer = ShardedOptimizer(
        net, torch.optim.AdamW, group=group, overlap=overlap, bucket_bytes=200, **options
    )
    for step in range(steps):
        _step(net, optimizer, group, step)
    return net, optimizer


def _step(net, optimizer, group, step):
    x = torch.arange(18.0, dtype=torch.float64).view(3, 6).sin() * (1 + group.rank + step)
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(2, 4, backend="delayed")
def test_late_weights_are_never_read_early():
    """On this back end a weight is NaN from the start of its gather until it is waited for."""
    group = Group.of(dist.group.WORLD)
    for zero in (1, 2):
        expected = gather_whole(_trained(group, 4, overlap=False, zero=zero)[0])
        net, _ = _trained(group, 4, overlap=True, zero=zero)
        for name, tensor in gather_whole(net).items():
            assert torch.equal(tensor, expected[name])
    net, _ = _trained(group, 1, overlap=False)
    held = list(net.parameters())
    _step(net, _trained(group, 0, overlap=False)[1], group, 1)
    assert all(one.isfinite().all() for one in held)


@ranks(2, backend="delayed")
def test_every_way_through_the_module_waits_and_wait_serves_what_is_held_otherwise():
    group = Group.of(dist.group.WORLD)
    net, optimizer = _trained(group, 0, overlap=True)
    held = list(net.parameters())
    for step, read in enumerate(
        (
            lambda: [one.weight for one in (net.body[0], net.body[2], net.head)],
            lambda: list(net.state_dict().values()),
            lambda: list(copy.deepcopy(net).parameters()),
            lambda: list(net.parameters()),
            lambda: (optimizer.wait(), held)[1],
        )
    ):
        _step(net, optimizer, group, step)
        with torch.no_grad():
            assert any(one.isnan().any() for one in held)
            assert not any(one.isnan().any() for one in read())
    _step(net, optimizer, group, 5)
    _step(net, optimizer, group, 6)
    optimizer.wait()
    assert all(type(one._parameters) is dict for one in net.modules())


@ranks(2)
def test_a_bucket_waits_alone():
    group = Group.of(dist.group.WORLD)
    net, optimizer = _trained(group, 1, overlap=True)
    flying = optimizer._gathers._flying
    before = len(flying)
    assert before >= 4
    assert net.body[0].weight.isfinite().all()
    assert 0 < len(flying) < before
    optimizer.wait()
    assert not flying


@ranks(2)
def test_compiled_modules_are_compiled_once():
    group = Group.of(dist.group.WORLD)
    expected = gather_whole(_trained(group, 4, overlap=False)[0])
    torch.manual_seed(0)
    net = _Net().double()
    net.compile(backend="eager", fullgraph=True)
    optimizer = ShardedOptimizer(
        net, torch.optim.AdamW, group=group, overlap=True, bucket_bytes=200
    )
    torch._dynamo.utils.counters.clear()
    for step in range(4):
        _step(net, optimizer, group, step)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for name, tensor in gather_whole(net).items():
        assert torch.equal(tensor, expected[name])
