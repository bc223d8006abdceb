"""Every fault turns an equality test red, and leaves nothing behind."""

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megablocks_core.groups as groups
from megablocks_core.groups import (
    LOCAL,
    Group,
    Mesh,
    Segment,
    ShardSpec,
    all_gather_to,
    all_to_all,
    collectives,
    copy_slices_to,
    copy_to,
    gather_from,
    mark,
    marking,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from megablocks_core.testing import assert_parallel_equivalence, ranks
from megablocks_core.testing.mutations import Mutation, mutation, mutations

ALL = [mutation.name for mutation in mutations()]
# Faults that this module cannot feel, and why.
NOT_FELT = {
    "all_gather_lists: doubled": "whole tensors are not gathered here",
    "all_gather_lists: dropped": "whole tensors are not gathered here",
    "mark: expert forgotten": "concerns data parallelism",
    "mark: stacking forgotten": "concerns names on disk",
}


class Everything(nn.Module):
    """Every collective once, packed segments, and slices that two ranks hold."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.pair = ShardSpec(0, group, (Segment(4, parts=1),))
        self.scale = nn.Parameter(torch.rand(4))
        self.bias = nn.Parameter(torch.randn(4))
        self.up = nn.Parameter(torch.randn(16 // group.size, 4))
        self.down = nn.Parameter(torch.randn(4, 8 // group.size))
        self.column = nn.Parameter(torch.randn(8 // group.size, 4))
        self.row = nn.Parameter(torch.randn(4, 8 // group.size))
        self.shared = nn.Parameter(torch.randn(4, 4))
        mark(self, "up", ShardSpec(0, group, (Segment(8), Segment(8))))
        mark(self, "down", ShardSpec(1, group))
        mark(self, "column", ShardSpec(0, group))
        mark(self, "row", ShardSpec(1, group))
        mark(self, "shared", self.pair)

    def forward(self, x_TH):
        group = self.group
        scale, bias = copy_to(self.scale, self.bias, group=group)
        x_tH = scatter_to(x_TH, dim=0, group=group)
        h_TH = all_gather_to(x_tH * scale, dim=0, group=group)
        gate, up = (h_TH @ self.up.T).chunk(2, dim=-1)
        y_tH = reduce_scatter_to((gate.tanh() * up) @ self.down.T, dim=0, group=group)
        (shared,) = copy_slices_to(self.shared, specs=[self.pair])
        y_tH = self.there_and_back(y_tH + bias) @ shared
        z_TH = gather_from(y_tH, dim=0, group=group)
        h_To = copy_to(z_TH, group=group) @ self.column.T
        return z_TH + reduce_from(h_To.tanh() @ self.row.T, group=group)

    def there_and_back(self, x_tH):
        """Work on rows at another rank: the right one does each row by its global place."""
        even = [x_tH.shape[0] // self.group.size] * self.group.size
        moved = all_to_all(x_tH, send=even, receive=even, group=self.group)
        return all_to_all(moved.tanh(), send=even, receive=even, group=self.group)


def _check():
    group = Mesh(tp=dist.get_world_size()).group("tp")
    x_TH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert_parallel_equivalence(Everything, x_TH, group=group, loss=lambda y: (y * y).sum())


@ranks(1, 2)
def test_without_a_fault_the_module_is_right():
    _check()


@pytest.mark.parametrize("name", ALL)
@ranks(2)
def test_every_fault_is_found(name):
    with mutation(name):
        if name in NOT_FELT:
            _check()
        else:
            with pytest.raises((AssertionError, ValueError, RuntimeError)):
                _check()
    _check()


def test_every_collective_has_faults():
    named = {name.split(":")[0] for name in ALL}
    assert named >= {
        "copy_to", "copy_slices_to", "reduce_from", "gather_from", "all_gather_to", "scatter_to",
        "reduce_scatter_to", "all_to_all", "marks", "mark",
    }  # fmt: skip
    assert len(ALL) == len(set(ALL))


def test_a_fault_reaches_every_importer_and_is_taken_back():
    mine = sys.modules[__name__]
    right = collectives.copy_to
    with mutation("copy_to: backward dropped"):
        assert collectives.copy_to is groups.copy_to is mine.copy_to
        assert collectives.copy_to is not right
        x = torch.ones(2)
        assert mine.copy_to(x, group=LOCAL) is x
    assert collectives.copy_to is groups.copy_to is mine.copy_to is right


def test_a_module_that_imports_during_a_fault_is_put_right_afterwards():
    late = ModuleType("late")
    sys.modules["late"] = late
    try:
        with mutation("mark: segments merged"):
            vars(late)["mark"] = marking.mark
        assert vars(late)["mark"] is marking.mark is mark
    finally:
        del sys.modules["late"]


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="name='no such' must be one of"):
        mutation("no such")


def test_mutations_are_taken_back_after_an_error():
    right = Group.all_reduce
    with pytest.raises(KeyError), mutation("all_reduce: dropped"):
        raise KeyError
    assert Group.all_reduce is right
    assert isinstance(next(mutations()), Mutation)
