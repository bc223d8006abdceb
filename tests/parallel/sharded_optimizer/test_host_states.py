"""Tensors wait on the host; each part finds its own, and what it changed is kept."""

from typing import Any

import torch

from megablocks_core.parallel.sharded_optimizer.host_states import HostStates, Place


class _LateCopies:
    """As on a device with streams of its own: nothing has arrived before it is waited for."""

    def __init__(self):
        self.flying = 0

    def start(self, source, target):
        held = source.clone()
        target.fill_(torch.nan)
        self.flying += 1
        return _LateCopy(self, held, target)


class _LateCopy:
    def __init__(self, copies, held, target):
        self.copies, self.held, self.target = copies, held, target

    def wait(self):
        self.target.copy_(self.held)
        self.copies.flying -= 1


class _Part:
    """Holds a tensor from the start, and one that its first turn makes."""

    device = torch.device("cpu")

    def __init__(self, number):
        self.number, self.held = number, {"first": torch.full((3,), float(number))}

    def places(self):
        return [
            Place((self.number, name), tensor, lambda x, name=name: self.held.__setitem__(name, x))
            for name, tensor in self.held.items()
        ]

    def work(self):
        self.held.setdefault("second", torch.zeros(5))
        for tensor in self.held.values():
            tensor.add_(1)


def _late():
    host = HostStates()
    copies: Any = _LateCopies()
    host._buffers.copies = copies
    return host, copies


def test_three_rounds_change_what_they_change():
    host, copies = _late()
    parts = [_Part(number) for number in range(4)]
    for part in parts:
        host.send(part)
    homes = [part.held["first"].data_ptr() for part in parts]
    for _ in range(3):
        for part in host.in_turn(parts):
            part.work()
            assert copies.flying <= 4  # the next part's come, the last one's go
    assert copies.flying == 0
    for part, home in zip(parts, homes, strict=True):
        assert part.held["first"].tolist() == [part.number + 3.0] * 3
        assert part.held["second"].tolist() == [3.0] * 5
        assert part.held["first"].data_ptr() == home


def test_a_round_copies_each_tensor_once_each_way():
    host, copies = _late()
    parts = [_Part(number) for number in range(3)]
    started = []
    start = copies.start
    copies.start = lambda source, target: (started.append(None), start(source, target))[1]
    for part in host.in_turn(parts):
        part.work()
    assert len(started) == 2 * 3  # all were here: they only leave
    started.clear()
    for part in host.in_turn(parts):
        part.work()
    assert len(started) == 2 * 2 * 3


def test_nothing_to_do():
    assert list(HostStates().in_turn([])) == []
