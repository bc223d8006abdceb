"""A recomputed call has the outputs and gradients of the call, and keeps what it promises."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megablocks_core.groups import LOCAL, Mesh, chunk_slice
from megablocks_core.parallel import (
    ColumnParallelLinear,
    DropoutKey,
    RowParallelLinear,
    column_linears,
    dropout,
)
from megablocks_core.parallel.recompute import recompute
from megablocks_core.parallel.replay import remember
from megablocks_core.testing import ranks
from tests.traffic import Traffic

F64 = torch.float64


class _Block(nn.Module):
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


def _block(group=LOCAL, **options):
    torch.manual_seed(0)
    return _Block(group, dtype=F64, **options)


def _results(block, call, *inputs):
    """Outputs, and gradients of inputs and parameters; random state is moved before backward."""
    block.zero_grad()
    torch.manual_seed(1)
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    output = call(*inputs)
    torch.rand(3)
    output.square().sum().backward()
    gradients = [x.grad for x in inputs] + [parameter.grad for parameter in block.parameters()]
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs) > 1
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def _x(*shape):
    return torch.linspace(-2, 2, torch.Size(shape).numel(), dtype=F64).view(shape)


_CALLS = {
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


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_outputs_and_gradients_are_those_of_the_call(sequence_parallel):
    group = Mesh(tp=dist.get_world_size()).group("tp")
    block = _block(group, sequence_parallel=sequence_parallel)
    x = _x(3, 4, 8)
    if sequence_parallel:
        x = x.chunk(group.size, dim=1)[group.rank].contiguous()
    plain = _results(block, block, x)
    others = {
        "into linears": _results(block, block.one_by_one, x),
        "keywords and nests": _results(block, lambda x: block(x * 0.5), x),
    }
    for name, call in _CALLS.items():
        _assert_same_bits(_results(block, partial(call, block), x), others.get(name, plain))


@pytest.mark.parametrize("frozen", ["x", "gate", "up", "down"])
@pytest.mark.parametrize("name", set(_CALLS) - {"keywords and nests"})
def test_frozen_parts(name, frozen):
    block, x = _block(), _x(4, 8)
    if frozen == "x":
        x = torch.arange(32).view(4, 8)
    else:
        getattr(block, frozen).requires_grad_(False)
    convert = lambda x: x.to(F64)  # noqa: E731
    plain = _results(block, lambda x: block(convert(x)), x)
    recomputed = _results(block, lambda x: _CALLS[name](block, convert(x)), x)
    _assert_same_bits(recomputed, plain)


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
    _assert_same_bits(*results)
    assert dtypes == [torch.bfloat16] * 3


# What is kept.


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    def count(self, *parts):
        return sum(any(part in name for part in parts) for name in self.names)


def _saved_bytes(call, *own):
    """Bytes of the storages that hooks outside see, without those of ``own``; and the output."""
    storages = {}

    def note(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        y = call()
    places = {x.untyped_storage().data_ptr() for x in own}
    return sum(len(s) for place, s in storages.items() if place not in places), y


def test_only_inputs_are_saved():
    block, x, note = _block(), _x(4, 8), torch.arange(5)
    x = (x * 1).requires_grad_() * 1
    for call in (
        lambda: recompute(lambda x, note: block(x), x, note),
        lambda: recompute(lambda x, note: block(x), x, note, keep=["matmul"]),
        lambda: recompute(lambda x, note: recompute(block, x), x, note),
    ):
        saved, _ = _saved_bytes(call, *block.parameters())
        assert saved == x.nbytes + note.nbytes
    plain, _ = _saved_bytes(lambda: block(x), *block.parameters())
    assert plain == x.nbytes * 2 + 4 * 16 * 8 * 4  # sin: its input and result; gate, up, 2 more


def _watching(call, watch):
    """``call`` with a weak reference to the memory of each result put in ``watch``."""

    def watched(*args):
        y = call(*args)
        watch.extend(weakref.ref(t.untyped_storage()) for t in (y if type(y) is tuple else (y,)))
        return y

    return watched


def _alive(watch):
    return [storage() is not None for storage in watch]


def test_what_the_function_makes_is_freed():
    block, made = _block(), []
    inner = _watching(block.inner, made)
    x = _x(4, 8).requires_grad_()
    y = recompute(lambda x: block.down(inner(x)), x)
    assert _alive(made) == [False]
    y.sum().backward()
    assert not any(_alive(made))
    z = block.down(inner(x))
    assert _alive(made)[-1]
    assert z.shape == y.shape


def test_kept_results_are_held_until_backward_is_done():
    block, made = _block(), []
    up = _watching(block.up, made)
    x = _x(4, 8).requires_grad_()
    y = recompute(lambda x: block.down(block.act(block.gate(x), up(x))), x, keep=["matmul"])
    assert _alive(made) == [True]
    with _Operations() as seen:
        y.sum().backward()
    assert not any(_alive(made))
    assert seen.count("aten::mm", "aten::addmm") == 6  # Gradients take two each.
    assert seen.names.count("aten::silu") == 1


def test_messages_that_are_kept_are_not_sent_again():
    _kept_messages()


@ranks(2)
def test_messages_that_are_kept_are_not_sent_again_over_ranks():
    _kept_messages()


def _kept_messages():
    group = Mesh(tp=dist.get_world_size()).group("tp") if dist.is_initialized() else LOCAL
    block = _block(group)

    def function(x):
        return block(block(x)).exp()

    sent = {}
    for kept in (None, (), ("messages",)):
        x = _x(4, 8).requires_grad_()
        y = function(x) if kept is None else recompute(function, x, keep=kept)
        with _Operations() as seen:
            y.sum().backward()
        sent[kept] = seen.count("_c10d_functional::all_reduce")
    twice = 0 if group.size == 1 else 2
    assert sent == {None: twice, (): 2 * twice, ("messages",): twice}


# A graph's ways.


@pytest.mark.parametrize("name", set(_CALLS) - {"keywords and nests"})
def test_micro_batches_and_second_walks(name):
    """Several forwards before backwards in any order; twice through one graph."""
    block = _block()
    call = partial(_CALLS[name], block)
    results = []
    for way in (block, call):
        block.zero_grad()
        xs = [(_x(4, 8) * scale).requires_grad_() for scale in (1, 2, 3)]
        ys = [way(x) for x in xs]
        for index in (1, 0, 2):
            ys[index].square().sum().backward(retain_graph=True)
        ys[1].square().sum().backward()
        (part,) = torch.autograd.grad(ys[0].sum(), block.up.weight, retain_graph=True)
        ys[0].sum().backward()
        results.append([*ys, part, *(x.grad for x in xs), *(p.grad for p in block.parameters())])
    _assert_same_bits(*results)


def test_gradients_off_is_the_call():
    block, x, made = _block(), _x(4, 8), []
    with torch.no_grad(), _Operations() as seen:
        y = recompute(block.inner, x, into=_watching(block.down, made), keep=["matmul"])
    assert torch.equal(y, block(x))
    assert seen.count("aten::mm", "aten::addmm") == 3


def test_second_derivatives():
    results = []
    for call in (torch.exp, partial(recompute, torch.exp)):
        x = _x(4).requires_grad_()
        (first,) = torch.autograd.grad(call(x * 2).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.sum(), x))
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("name", _CALLS)
def test_nothing_is_kept_alive_after_backward(name):
    """Neither with a graph that was walked, nor with one that was dropped."""
    block, made = _block(), []
    inner, act = _watching(block.inner, made), _watching(block.act, made)
    block.inner, block.act = inner, act  # type: ignore
    gc.collect()
    gc.disable()
    try:
        for walked in (True, False):
            x = (_x(4, 8).requires_grad_()).clone()
            made.append(weakref.ref(x.untyped_storage()))
            y = _CALLS[name](block, x)
            if walked:
                y.sum().backward()
            del x, y
            assert len(made) > 1 and not any(_alive(made))
    finally:
        gc.enable()


def test_memory_is_flat_over_50_steps():
    block, alive = _block(), []
    for step in range(50):
        for call in _CALLS.values():
            call(block, _x(4, 8).requires_grad_()).sum().backward()
        block.zero_grad()
        if step in (2, 49):
            alive.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
    assert alive[0] == alive[1]


# Errors.


def test_an_argument_changed_in_place_raises():
    block = _block()
    x = _x(4, 8).requires_grad_() * 1
    y = recompute(block, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("keep", [["mat"], ["matmul", torch.mm], [torch.ops.aten.mm]])
def test_an_unknown_operation_raises(keep):
    with pytest.raises(ValueError, match=r"keep=.* must be one of"):
        recompute(torch.exp, torch.ones(2, requires_grad=True), keep=keep)


def test_another_path_raises():
    lengths = iter([1, 2])
    y = recompute(lambda x: x.exp()[: next(lengths)].exp(), torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="different metadata"):
        y.sum().backward()


# Arguments cut over ranks.


@ranks(2, 4)
def test_f_104_arguments_are_gathered_over_the_ranks_that_cut_them():
    """Two tensor-parallel replicas with different data: each has the gradients of its own."""
    size = dist.get_world_size()
    mesh = Mesh(tp=2, dp=size // 2)
    tp, replica = mesh.group("tp"), mesh.group("dp").rank
    block = _block(tp)
    x = _x(3, 5, 8) * (1 + replica)
    plain = _results(block, block, x)
    for call in (
        lambda x: recompute(block, x, cut_over=tp),
        lambda x: recompute(block.inner, x, into=block.down, cut_over=tp),
        lambda x: recompute(partial(recompute, block, cut_over=tp), x, cut_over=tp),
    ):
        _assert_same_bits(_results(block, call, x), plain)


@ranks(2, 4)
def test_a_cut_argument_leaves_a_slice_and_costs_one_gather():
    """Uneven slices too; integers, parameters and other layouts stay whole."""
    group = Mesh(tp=dist.get_world_size()).group("tp")
    weight = nn.Parameter(_x(8))
    for x in (_x(3, 7), _x(1), _x(8, 3).t()):
        reference, own = (x.detach().requires_grad_() for _ in range(2))
        index, argument = torch.arange(x.shape[-1]), own * 1

        def function(x, index, weight):
            return x[..., index].sin() * weight[0]

        call = partial(recompute, function, cut_over=group)
        saved, y = _saved_bytes(lambda c=call, x=argument, i=index: c(x, i, weight), weight)
        cut = own.is_contiguous()
        part = chunk_slice(x.numel(), group.size, group.rank)
        held = part.stop - part.start if cut else x.numel()
        assert saved == held * 8 + index.nbytes
        with Traffic() as sent:
            y.sum().backward()
        assert sent.counts().get("all_gather", 0) == cut
        function(reference * 1, index, weight).sum().backward()
        assert torch.equal(own.grad, reference.grad)


# Traffic and compilation.


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_messages_are_sent_again_up_to_the_last_saved_tensor(sequence_parallel):
    """Two blocks: the message that ends the second feeds nothing that backward reads."""
    group = Mesh(tp=2).group("tp")
    block = _block(group, sequence_parallel=sequence_parallel)
    sent = []
    for call in (lambda x: block(block(x)), lambda x: recompute(lambda x: block(block(x)), x)):
        x = _x(4, 8).requires_grad_()
        with Traffic() as forward:
            y = call(x)
        with Traffic() as backward:
            y.sum().backward()
        kinds = ("all_reduce", "all_gather", "reduce_scatter")
        counts = [traffic.counts() for traffic in (forward, backward)]
        sent.append([[count.get(kind, 0) for kind in kinds] for count in counts])
    (forward, backward), recomputed = sent
    again = [0, 2, 1] if sequence_parallel else [1, 0, 0]
    assert recomputed == [forward, [a + b for a, b in zip(backward, again, strict=True)]]


_COMPILED = {name: _CALLS[name] for name in ("whole", "twice nested", "into", "keeps")}


def _remembering(block, x):
    return recompute(lambda x: block(x.gather(-1, remember(lambda: x.argsort(-1)))), x)


@pytest.mark.filterwarnings("ignore:.*context_fn.*")
@pytest.mark.parametrize("name", [*_COMPILED, "remembering"])
def test_it_compiles_whole(name):
    block = _block()
    call = partial(_COMPILED.get(name, _remembering), block)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    _assert_same_bits(_results(block, compiled, _x(4, 8)), _results(block, call, _x(4, 8)))


@ranks(2, timeout=180)
def test_it_compiles_whole_on_two_ranks():
    group = Mesh(tp=2).group("tp")
    for sequence_parallel in (False, True):
        block = _block(group, sequence_parallel=sequence_parallel)
        for call in _COMPILED.values():
            torch._dynamo.reset()
            compiled = torch.compile(partial(call, block), fullgraph=True, backend="aot_eager")
            ours = _results(block, compiled, _x(4, 8))
            for pair in zip(ours, _results(block, block, _x(4, 8)), strict=True):
                torch.testing.assert_close(*pair)


def test_compiled_code_recomputes():
    """The graph of backward computes ``sin`` again, which it otherwise would have kept."""
    graphs = []

    def note(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    for call in (lambda x: x.sin().exp(), partial(recompute, lambda x: x.sin().exp())):
        torch._dynamo.reset()
        y = torch.compile(call, fullgraph=True, backend=backend)(_x(4).requires_grad_())
        y.sum().backward()
    assert [sum("sin.default" in name for name in graph) for graph in graphs] == [1, 0, 1, 1]


@ranks(2)
def test_cut_over_in_compiled_code_raises():
    torch._dynamo.reset()
    call = partial(recompute, torch.exp, cut_over=Mesh(tp=2).group("tp"))
    with pytest.raises(Exception, match=r"cut_over=.* must be LOCAL in compiled code"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(torch.ones(2, requires_grad=True))
