"""A block to recompute, the ways to do it, and what to look at."""

import weakref
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from megablocks_core.groups import LOCAL
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_linears,
)
from megablocks_core.parallel.memory.recompute import recompute

F64 = torch.float64


class Block(nn.Module):
    """A gated feed-forward layer, cut over ranks."""

    def __init__(self, group=LOCAL, *, sequence_parallel=False, keep=(), **options):
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "group": group, **options}
        self.gate = ColumnParallelLinear(8, 16, **options)
        self.up = ColumnParallelLinear(8, 16, **options)
        self.down = RowParallelLinear(16, 8, **options)

    def inner(self, x):
        return self.act(*column_linears(x.sin(), self.gate, self.up))

    def act(self, gate, up):
        return F.silu(gate) * up

    def forward(self, x):
        return self.down(self.inner(x))

    def one_by_one(self, x):
        y = x.sin()
        return self.down(self.act(self.gate(y), self.up(y)))


def block_of(group=LOCAL, **options):
    torch.manual_seed(0)
    return Block(group, dtype=F64, **options)


def results_of(block, call, *inputs):
    """Outputs, and gradients of inputs and parameters; random state is moved before backward."""
    block.zero_grad()
    torch.manual_seed(1)
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    output = call(*inputs)
    torch.rand(3)
    output.square().sum().backward()
    gradients = [x.grad for x in inputs] + [parameter.grad for parameter in block.parameters()]
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


def assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs) > 1
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def ramp(*shape):
    return torch.linspace(-2, 2, torch.Size(shape).numel(), dtype=F64).view(shape)


CALLS = {
    "whole": lambda block, x: recompute(block, x),
    "twice nested": lambda block, x: recompute(partial(recompute, block), x),
    "in parts": lambda block, x: recompute(block.down, recompute(block.inner, x)),
    "into": lambda block, x: recompute(block.inner, x, into=block.down),
    "into nested": lambda block, x: recompute(
        lambda x: recompute(block.inner, x, into=block.down), x
    ),
    "into several": lambda block, x: block.down(
        block.act(*recompute(torch.sin, x, into=lambda y: column_linears(y, block.gate, block.up)))
    ),
    "into linears": lambda block, x: block.down(
        recompute(torch.sin, x, into=lambda y: block.act(block.gate(y), block.up(y)))
    ),
    "keeps": lambda block, x: recompute(block, x, keep=["matmul", "messages"]),
    "keeps nested": lambda block, x: recompute(
        lambda x: recompute(block, x, keep=["matmul"]), x, keep=["messages"]
    ),
    "keeps and into": lambda block, x: recompute(
        block.inner, x, into=block.down, keep=[torch.ops.aten.silu.default]
    ),
    "keywords and nests": lambda block, x: recompute(
        partial(lambda pair, *, scale: block(pair["x"] * scale), scale=0.5), {"x": x, "n": None}
    ),
}


def saved_bytes(call, *own):
    """Bytes of the storages that hooks outside see, without those of ``own``; and the output."""
    storages = {}

    def note(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        y = call()
    places = {x.untyped_storage().data_ptr() for x in own}
    return sum(len(s) for place, s in storages.items() if place not in places), y


def watching(call, watch):
    """``call`` with a weak reference to the memory of each result put in ``watch``."""

    def watched(*args):
        y = call(*args)
        watch.extend(weakref.ref(t.untyped_storage()) for t in (y if type(y) is tuple else (y,)))
        return y

    return watched


def are_alive(watch):
    return [storage() is not None for storage in watch]
