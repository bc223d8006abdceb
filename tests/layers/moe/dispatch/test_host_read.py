"""Counts are read once, and a recomputed region reads none again."""

import torch

from megablocks_core.layers.moe.dispatch import host_read
from megablocks_core.layers.moe.dispatch.host_read import HostRead, read_counts
from megablocks_core.parallel import recompute


def test_values_are_those_in_order():
    assert read_counts(torch.tensor([[3, 1], [0, 2]])) == [3, 1, 0, 2]
    assert read_counts(torch.empty(0, dtype=torch.int64)) == []
    under_way = HostRead(torch.tensor([5]))
    assert under_way.values() is under_way.values()


def test_a_recomputed_region_reads_once(monkeypatch):
    reads = []

    class Counted(HostRead):
        def values(self):
            reads.append(self)
            return super().values()

    monkeypatch.setattr(host_read, "HostRead", Counted)

    def block(x):
        (first,) = read_counts(torch.tensor([2]))
        return (x[:first] ** 2).sum()

    x = torch.ones(3, requires_grad=True)
    recompute(block, x).backward()
    assert x.grad.tolist() == [2, 2, 0] and len(reads) == 1
