"""Saved tensors go to the host and come back the same; what stays, what moves, what is freed."""

import gc
import math
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from megablocks_core.groups.copies import Copies, Copy
from megablocks_core.parallel import HostBuffers, offload, recompute

F64 = torch.float64


class _LateCopies(Copies):
    """Copies that happen when they are waited for; until then the target is poisoned."""

    def __init__(self):
        super().__init__()
        self.started: list[tuple[int, int]] = []
        self.targets: list[weakref.ref[torch.UntypedStorage]] = []

    def start(self, source, target):
        target.fill_(255)
        self.started.append((source.data_ptr(), target.data_ptr()))
        self.targets.append(weakref.ref(target.untyped_storage()))
        return _LateCopy(source, target)


class _LateCopy(Copy):
    def wait(self):
        if self._held is not None:
            source, target = self._held
            target.copy_(source)
        super().wait()


class _LateBuffers(HostBuffers):
    def __init__(self):
        super().__init__()
        self.copies = _LateCopies()
        self.started, self.targets = self.copies.started, self.copies.targets


_on_cpu = partial(offload, min_bytes=1, from_host=True)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4), nn.Tanh(), nn.Softmax(-1)
    ).to(F64)


def _x():
    return torch.linspace(-1, 1, 12, dtype=F64).view(3, 4).requires_grad_()


def _results(model, call):
    model.zero_grad()
    x = _x()
    y = call(x * 1)
    y.square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in model.parameters())]


def _assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def _offloaded(function, buffers):
    def call(x):
        with _on_cpu(buffers):
            return function(x)

    return call


_WAYS = {
    "alone": lambda model, buffers: _offloaded(model, buffers),
    "around recomputation": lambda model, buffers: _offloaded(partial(recompute, model), buffers),
    "inside recomputation": lambda model, buffers: partial(recompute, _offloaded(model, buffers)),
    "around an output that is freed": lambda model, buffers: _offloaded(
        lambda x: recompute(model[:3], x, into=model[3:]), buffers
    ),
    "inside another": lambda model, buffers: _offloaded(_offloaded(model, buffers), buffers),
    "of a part": lambda model, buffers: lambda x: model[2:](_offloaded(model[:2], buffers)(x)),
    "as a consumer": lambda model, buffers: (
        lambda x: recompute(model[:3], x, into=_offloaded(model[3:], buffers))
    ),
}


@pytest.mark.parametrize("way", _WAYS)
def test_outputs_and_gradients_are_those_without(way):
    model, buffers = _model(), _LateBuffers()
    expected = _results(model, model)
    for _ in range(2):
        _assert_same_bits(_results(model, _WAYS[way](model, buffers)), expected)
    assert buffers.allocated > 0


def test_compiled_models_can_be_offloaded():
    model, buffers = _model(), _LateBuffers()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = _results(model, compiled)
    _assert_same_bits(_results(model, _offloaded(compiled, buffers)), expected)
    assert buffers.allocated > 0


# What moves.


def test_parameters_leaves_their_views_and_small_tensors_stay():
    weight, frozen = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4), False)
    x = torch.ones(4, 4, requires_grad=True)
    buffers = _LateBuffers()
    with offload(buffers, min_bytes=1, from_host=True) as moved:
        y = (x @ weight.t()).sin() * frozen[:2].repeat(2) + x[:1].sin()
    assert (moved.tensors, moved.bytes) == (2, (16 + 4) * 4)  # The product, the repeated.
    with offload(buffers, min_bytes=65, from_host=True) as moved:
        z = (y * 1).sin()
    assert moved.tensors == 0
    with offload(buffers, min_bytes=64, from_host=True) as moved:
        z = (y * 1).sin()
    assert (moved.tensors, moved.bytes) == (1, 64)
    z.sum().backward()


def test_tensors_on_the_host_stay_unless_asked_for():
    with offload(HostBuffers(), min_bytes=1) as moved:
        _model()(_x())
    assert moved.tensors == 0


def test_memory_moves_once_however_many_tensors_lie_in_it():
    """Twice the same, views, a transposed one, one of another dtype; and it comes back once."""

    def function(x):
        y = x * 1
        pairs = torch.view_as_complex(y.view(3, 2, 2))
        return y.square() + y.t().sin().t() + y * y[0] + (pairs * pairs).real.sum()

    buffers, x, reference = _LateBuffers(), _x(), _x()
    with _on_cpu(buffers) as moved:
        z = function(x)
    assert (moved.tensors, moved.bytes) == (1, 12 * 8)
    z.sum().backward()
    assert len(buffers.started) == 2
    function(reference).sum().backward()
    assert torch.equal(x.grad, reference.grad)


def test_memory_that_was_changed_between_two_savings_moves_twice():
    x, y = _x(), torch.ones(3, 4, dtype=F64)
    with _on_cpu(_LateBuffers()) as moved:
        first = (x * y).sum()
        y.add_(1)
        second = (x * y).sum()
    assert moved.tensors == 2
    second.backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_new_memory_in_an_old_place_is_not_taken_for_the_old():
    x, buffers, outputs = _x(), _LateBuffers(), []
    with _on_cpu(buffers) as moved:
        for step in range(20):
            outputs.append(x * torch.full((3, 4), float(step), dtype=F64))
    assert moved.tensors == 20
    torch.stack(outputs).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, float(sum(range(20)))))


def test_tensors_come_back_in_reverse_order_one_ahead():
    buffers, leaf, seen = _LateBuffers(), _x(), []
    with _on_cpu(buffers) as moved:
        y = leaf
        for _ in range(4):
            y = (y * 1).sin()
            y.register_hook(lambda _: seen.append(len(buffers.started) - 4))
    assert moved.tensors == len(buffers.started) == 4
    left = [target for _, target in buffers.started]
    y.sum().backward()
    assert [source for source, _ in buffers.started[4:]] == left[::-1]
    assert seen == [0, 2, 3, 4]


@pytest.mark.parametrize("min_bytes", [1, 1 << 20])
@pytest.mark.parametrize("changed", ["input", "result"])
def test_a_tensor_changed_in_place_raises_as_without(changed, min_bytes):
    """Whether it moved or stayed."""
    for hooks in (nullcontext(), offload(_LateBuffers(), min_bytes=min_bytes, from_host=True)):
        x = _x() * 1
        with hooks:
            y = x.square() if changed == "input" else x.exp()
        with torch.no_grad():
            (x if changed == "input" else y).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# What is freed.


def test_what_moved_is_freed_on_the_device():
    made, model = [], _model()
    for part in model:
        part.register_forward_hook(lambda m, a, y: made.append(weakref.ref(y.untyped_storage())))
    with _on_cpu(HostBuffers()):
        y = model(_x()).sum()
    assert len(made) == len(model) and not any(storage() is not None for storage in made)
    y.backward()


@pytest.mark.parametrize("way", _WAYS)
def test_buffers_come_back_and_nothing_stays(way):
    """After backward, after a graph that was dropped, and after an error in forward."""
    model, buffers = _model(), _LateBuffers()
    call = _WAYS[way](model, buffers)
    gc.collect()
    gc.disable()
    try:
        for end in ("walked", "dropped", "twice"):
            x = _x() * 1
            storage = weakref.ref(x.untyped_storage())
            y = call(x)
            if end != "dropped":
                y.sum().backward(retain_graph=end == "twice")
            if end == "twice":
                y.sum().backward()
            del x, y
            assert buffers.free == buffers.allocated
            assert storage() is None
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            call(torch.ones(3, 5, dtype=F64, requires_grad=True))
        assert buffers.free == buffers.allocated
    finally:
        gc.enable()


def test_what_came_back_goes_after_use_though_the_graph_stays():
    buffers, x = _LateBuffers(), _x()
    with _on_cpu(buffers) as moved:
        y = (x * 1).sin() * (x * 2).square()
    for walk in (1, 2):
        y.sum().backward(retain_graph=True)
        back = buffers.targets[moved.tensors :]
        assert len(back) == walk * moved.tensors > 1
        assert all(storage() is None for storage in back)


def test_memory_is_flat_over_50_steps():
    model, buffers, alive, allocated = _model(), _LateBuffers(), [], []
    calls = [way(model, buffers) for way in _WAYS.values()]
    for step in range(50):
        for call in calls:
            call(_x()).sum().backward()
        model.zero_grad()
        allocated.append(buffers.allocated)
        if step in (2, 49):
            alive.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
    assert alive[0] == alive[1]
    assert allocated[2] == allocated[-1]


def test_micro_batches_share_buffers_and_walk_in_any_order():
    model, buffers = _model(), _LateBuffers()
    results = []
    for call in (model, _WAYS["alone"](model, buffers)):
        model.zero_grad()
        xs = [(_x() * scale).detach().requires_grad_() for scale in (1, 2, 3)]
        ys = [call(x) for x in xs]
        for index in (1, 0, 2):
            ys[index].square().sum().backward(retain_graph=True)
        ys[1].sum().backward()
        (part,) = torch.autograd.grad(ys[0].sum(), model[0].weight)
        results.append([*ys, part, *(x.grad for x in xs), *(p.grad for p in model.parameters())])
    _assert_same_bits(*results)


def test_bytes_follow_the_formula():
    """A linear layer saves its input, ``tanh`` its result."""
    layer = nn.Linear(4, 8, dtype=F64)
    with _on_cpu(_LateBuffers()) as moved:
        layer(_x() * 1).tanh().sum().backward()
    assert moved.bytes == 12 * 8 + 24 * 8


def test_gradients_off_moves_nothing():
    buffers = _LateBuffers()
    with torch.no_grad(), _on_cpu(buffers) as moved:
        _model()(_x())
    assert (moved.bytes, buffers.allocated) == (0, 0)


@pytest.mark.parametrize("min_bytes", [math.nan, -1, 1.5, math.inf, "1", None])
def test_a_size_that_is_none_is_refused_by_name(min_bytes):
    refused = pytest.raises(ValueError, match=r"min_bytes=.* must be a whole number of 0 or more")
    with refused, offload(HostBuffers(), min_bytes=min_bytes):
        pass
