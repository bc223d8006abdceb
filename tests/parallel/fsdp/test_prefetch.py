"""An order knows places and successors; units gather the next one early from the second step on."""

from typing import Any

import torch
from torch import nn

from megablocks_core.groups import Mesh
from megablocks_core.parallel import fully_shard
from megablocks_core.parallel.fsdp.prefetch import IndexedOrder, Recording
from megablocks_core.testing import ranks


def test_places_and_successors():
    order = IndexedOrder([3, 0, 2])
    assert [order.place(unit) for unit in range(4)] == [1, None, 2, 0]
    assert [order.successor(unit) for unit in range(4)] == [2, None, None, 0]


def test_a_unit_that_comes_twice_has_no_place_and_is_no_successor():
    order = IndexedOrder([0, 1, 0, 2, 1, 0])
    assert [order.place(unit) for unit in range(3)] == [None, None, 3]
    assert [order.successor(unit) for unit in range(3)] == [None, None, None]


def test_a_recording_gives_both_orders():
    recording = Recording()
    recording.forward += [0, 1]
    recording.backward += [1, 0]
    forward, backward = recording.orders()
    assert (forward.successor(0), backward.successor(1)) == (1, 0)


class Crooked(nn.Module):
    """Runs its layers in an order of its own, the first of them twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for number in (2, 0, 3, 1, 2):
            x = x + self.layers[number](x).tanh()
        return x


@ranks(2)
def test_units_prefetch_in_the_order_of_the_first_step():
    net: Any = fully_shard(Crooked(), group=Mesh().group("dp"))

    def told(name):
        states = [unit._get_fsdp_state() for unit in (*net.layers, net)]
        return [[states.index(one) for one in getattr(state, name)] for state in states]

    nothing = [[] for _ in range(5)]
    assert told("_states_to_forward_prefetch") == nothing
    with torch.no_grad():
        net(torch.ones(2, 4))  # no step
    assert told("_states_to_forward_prefetch") == nothing
    net(torch.ones(2, 4)).sum().backward()
    # Forward: root 2 0 3 1 2; the root has no parameters, so that nobody sees it run.
    assert told("_states_to_forward_prefetch") == [[3], [], [], [1], []]
    assert told("_states_to_backward_prefetch") == [[], [3], [], [0], []]
    before = [p.grad.full_tensor() for p in net.parameters()]
    net.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    for parameter, gradient in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter.grad.full_tensor(), gradient)


@ranks(2)
def test_without_prefetch_nothing_is_told():
    net: Any = fully_shard(Crooked(), group=Mesh().group("dp"), prefetch=False)
    net(torch.ones(2, 4)).sum().backward()
    assert not any(unit._get_fsdp_state()._states_to_forward_prefetch for unit in net.layers)
