"""A recomputed call has the outputs and gradients of the call."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from megablocks_core.groups import Mesh
from megablocks_core.parallel import (
    DropoutKey,
    dropout,
)
from megablocks_core.parallel.memory.recompute import recompute
from megablocks_core.parallel.memory.replay import remember
from megablocks_core.testing import ranks
from tests.parallel.recompute_blocks import (
    CALLS,
    assert_same_bits,
    block_of,
    ramp,
    results_of,
    watching,
)
from tests.parallel.watching import Operations

F64 = torch.float64


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_outputs_and_gradients_are_those_of_the_call(sequence_parallel):
    group = Mesh(tp=dist.get_world_size()).group("tp")
    block = block_of(group, sequence_parallel=sequence_parallel)
    x = ramp(3, 4, 8)
    if sequence_parallel:
        x = x.chunk(group.size, dim=1)[group.rank].contiguous()
    plain = results_of(block, block, x)
    others = {
        "into linears": results_of(block, block.one_by_one, x),
        "keywords and nests": results_of(block, lambda x: block(x * 0.5), x),
    }
    for name, call in CALLS.items():
        assert_same_bits(results_of(block, partial(call, block), x), others.get(name, plain))


@pytest.mark.parametrize("frozen", ["x", "gate", "up", "down"])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "keywords and nests"])
def test_frozen_parts(name, frozen):
    block, x = block_of(), ramp(4, 8)
    if frozen == "x":
        x = torch.arange(32).view(4, 8)
    else:
        getattr(block, frozen).requires_grad_(False)
    convert = lambda x: x.to(F64)  # noqa: E731
    plain = results_of(block, lambda x: block(convert(x)), x)
    recomputed = results_of(block, lambda x: CALLS[name](block, convert(x)), x)
    assert_same_bits(recomputed, plain)


# Random draws.


def _drops(kind):
    if kind == "dropout of torch":
        return lambda x: F.dropout(x, 0.5)
    if kind == "bernoulli":
        return lambda x: x * torch.bernoulli(torch.full_like(x, 0.5))
    if kind == "own generator":
        generator = torch.Generator().manual_seed(3)
        return lambda x: x * remember(lambda: torch.rand(1000, generator=generator) < 0.5)
    key = DropoutKey(seed=3, step=0)
    index = key.index(torch.zeros(1, dtype=torch.int64), torch.arange(1))
    return lambda x: dropout(x.view(1, 1000), 0.5, stream="test", index=index).view(1000)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "kind", ["dropout of torch", "bernoulli", "own generator", "dropout by counter"]
)
def test_f_101_a_second_run_drops_what_the_first_did(kind, nested):
    x = torch.ones(1000, requires_grad=True)
    drop = _drops(kind)
    torch.manual_seed(0)

    def function(x):
        return drop(x.exp().log()) * x

    call = partial(recompute, function) if nested else function
    y = recompute(call, x)
    torch.rand(5)
    y.sum().backward()
    assert torch.equal(y == 0, x.grad == 0)
    assert 400 < (y == 0).sum() < 600


def test_random_state_goes_on_as_without_recomputation():
    after = []
    for call in (F.dropout, partial(recompute, F.dropout)):
        torch.manual_seed(0)
        call(torch.ones(10, requires_grad=True)).sum().backward()
        after.append(torch.rand(3))
    assert torch.equal(*after)


def test_autocast_is_restored():
    weight = torch.randn(8, 8, requires_grad=True)
    results, dtypes = [], []

    def function(x):
        y = x.sin() @ weight
        dtypes.append(y.dtype)
        return y.exp().float()

    for call in (function, partial(recompute, function)):
        x, weight.grad = torch.ones(4, 8, requires_grad=True), None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(x)
        y.sum().backward()
        results.append([y, x.grad, weight.grad])
    assert_same_bits(*results)
    assert dtypes == [torch.bfloat16] * 3


# A graph's ways.


@pytest.mark.parametrize("name", [name for name in CALLS if name != "keywords and nests"])
def test_micro_batches_and_second_walks(name):
    """Several forwards before backwards in any order; twice through one graph."""
    block = block_of()
    call = partial(CALLS[name], block)
    results = []
    for way in (block, call):
        block.zero_grad()
        xs = [(ramp(4, 8) * scale).requires_grad_() for scale in (1, 2, 3)]
        ys = [way(x) for x in xs]
        for index in (1, 0, 2):
            ys[index].square().sum().backward(retain_graph=True)
        ys[1].square().sum().backward()
        (part,) = torch.autograd.grad(ys[0].sum(), block.up.weight, retain_graph=True)
        ys[0].sum().backward()
        results.append([*ys, part, *(x.grad for x in xs), *(p.grad for p in block.parameters())])
    assert_same_bits(*results)


def test_gradients_off_is_the_call():
    block, x, made = block_of(), ramp(4, 8), []
    with torch.no_grad(), Operations() as seen:
        y = recompute(block.inner, x, into=watching(block.down, made), keep=["matmul"])
    assert torch.equal(y, block(x))
    assert seen.count("aten::mm", "aten::addmm") == 3


def test_second_derivatives():
    results = []
    for call in (torch.exp, partial(recompute, torch.exp)):
        x = ramp(4).requires_grad_()
        (first,) = torch.autograd.grad(call(x * 2).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.sum(), x))
    assert torch.equal(results[0][0], results[1][0])


# Errors.


def test_an_argument_changed_in_place_raises():
    block = block_of()
    x = ramp(4, 8).requires_grad_() * 1
    y = recompute(block, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("keep", [["mat"], ["matmul", torch.mm], [torch.ops.aten.mm]])
def test_an_unknown_operation_raises(keep):
    with pytest.raises(ValueError, match=r"keep=.* must be one of"):
        recompute(torch.exp, torch.ones(2, requires_grad=True), keep=keep)


def test_what_cannot_be_called_raises():
    with pytest.raises(ValueError, match="function=3 must be callable"):
        recompute(3)  # type: ignore
    with pytest.raises(ValueError, match="into=3 must be callable, or None"):
        recompute(torch.exp, torch.ones(2), into=3)  # type: ignore


def test_another_path_raises():
    lengths = iter([1, 2])
    y = recompute(lambda x: x.exp()[: next(lengths)].exp(), torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="different metadata"):
        y.sum().backward()
