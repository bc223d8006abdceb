"""The reducer's messages, their order and overlap, and what may interrupt a backward."""

import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from megablocks_core.groups import LOCAL, Group, Mesh, mark, marks
from megablocks_core.groups import buffers as messages
from megablocks_core.groups.gradient_shards import ShardedGradient
from megablocks_core.parallel.data_parallel import bucket_messages
from megablocks_core.parallel.data_parallel.reducer import Reducer
from megablocks_core.testing import ranks


def _world():
    return Group.of(dist.group.WORLD)


def _model(layers=3):
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*parts).double()


def _x(group):
    return torch.randn(group.size, 3, 4, dtype=torch.float64, generator=torch.manual_seed(1))


def _whole_gradients(model, x, divisor):
    (model(x).square().sum() / divisor).backward()
    return [parameter.grad.view(-1) for parameter in model.parameters()]


def _shards_over(group, replicate, **options):
    model = _model()
    reducer = Reducer(
        marks(model), group=group, replicate=replicate, bucket_bytes=300, shards=True, **options
    )
    world = _world()
    x = _x(world)
    for _ in range(2):
        reducer.drop()
        with reducer.no_sync():
            model(x[world.rank]).square().sum().backward()
        for _ in range(2):
            model(x[world.rank]).square().sum().backward()
        gradients = _whole_gradients(_model(), x, world.size / 3)
        for bucket, own in zip(reducer.buckets, reducer.shards, strict=True):
            flat = torch.zeros(bucket.length, dtype=torch.float64)
            for slot in bucket.slots:
                flat[slot.start : slot.stop] = gradients[slot.index]
            start, stop = bucket.shard(group.rank)
            assert_close(own, flat[start:stop], rtol=0, atol=1e-10)
        assert all(reducer.used)
        assert all(type(parameter.grad) is ShardedGradient for parameter in model.parameters())


@ranks(1, 2, 4)
@pytest.mark.parametrize("keep_full", [True, False])
def test_shards_are_ranges_of_the_sums(keep_full):
    _shards_over(_world(), LOCAL, keep_full=keep_full)


@ranks(4)
def test_shards_are_summed_over_copies():
    group, replicate = Mesh(dp=4).split("dp", inner=2)
    _shards_over(group, replicate)


@ranks(4, backend="delayed")
def test_late_messages_change_nothing():
    group, replicate = Mesh(dp=4).split("dp", inner=2)
    _shards_over(group, replicate)
    _shards_over(_world(), LOCAL, keep_full=False)
    _whole_over(_world())


def _whole_over(group):
    model = _model()
    reducer = Reducer(marks(model), group=group, bucket_bytes=300)
    x = _x(group)
    for step in range(3):
        model.zero_grad()
        model(x[group.rank] + step).square().sum().backward()
        twin = _model()
        _whole_gradients(twin, x + step, group.size)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)
    return reducer


@ranks(2)
def test_full_memory_lives_only_while_it_is_needed():
    for keep_full in (True, False):
        model = _model()
        reducer = Reducer(marks(model), group=_world(), shards=True, keep_full=keep_full)
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        held = [buffer._memory is not None for buffer in reducer._buffers]
        assert held == [keep_full]


@ranks(2)
def test_memory_is_given_back_while_backward_goes_on():
    """Six buckets of which three are there at a time: one that fills, two under way."""
    model = _Layers()
    reducer = Reducer(marks(model), group=_world(), bucket_bytes=80, shards=True, keep_full=False)
    held = []

    def count(_):
        held.append(sum(buffer._memory is not None for buffer in reducer._buffers))

    for layer in model.layers:
        layer.bias.register_hook(count)
    for _ in range(2):
        held.clear()
        reducer.drop()
        model(torch.ones(1, 4)).sum().backward()
    assert len(reducer.buckets) == len(held) == 6
    assert max(held) <= 3


@ranks(2)
def test_one_message_for_each_bucket_and_one_of_flags():
    group = _world()
    model = _model()
    mark(model[4], "weight", expert=True)
    reducer = Reducer(marks(model), group=group, expert_group=group, bucket_bytes=200)
    dense = sum(not bucket.expert for bucket in reducer.buckets)
    assert (dense, len(reducer.buckets)) == (2, 3)
    x = torch.ones(1, 4, dtype=torch.float64)
    model(x).sum().backward()  # the first one agrees on an order too, in words
    for _ in range(2):
        with CommDebugMode() as traffic:
            model(x).sum().backward()
        assert traffic.get_total_counts() == len(reducer.buckets) + 2
        with reducer.no_sync(), CommDebugMode() as traffic:
            model(x).sum().backward()
        assert traffic.get_total_counts() == 0


@contextmanager
def _sent():
    """The bytes of every all-reduce in it."""
    sent, all_reduce = [], dist.all_reduce

    def counted(tensor, *args, **options):
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *args, **options)

    dist.all_reduce = counted
    try:
        yield sent
    finally:
        dist.all_reduce = all_reduce


@ranks(2)
def test_bytes_sent_are_those_of_the_parameters_and_one_for_each():
    model = _model()
    reducer = Reducer(marks(model), group=_world(), bucket_bytes=300)
    with _sent() as sent:
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert len(sent) == len(reducer.buckets) + 1
    assert sum(sent) == sum(sizes) + len(sizes)


def _both_kinds(group, expert_group, **options):
    """Ranks reach experts and dense layers in opposite orders; all weights are as large."""
    dense, experts = (
        nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(4)]) for _ in range(2)
    )
    for layer in experts:
        mark(layer, "weight", expert=True)
    model = nn.ModuleList([dense, experts])
    groups = {"group": group, "expert_group": expert_group}
    reducer = Reducer(marks(model), **groups, bucket_bytes=64, reduction="sum", **options)
    world = _world()
    for _ in range(3):
        model.zero_grad()
        reducer.drop()
        loss = torch.zeros(())
        layers = list(enumerate([*dense, *experts]))
        for number, layer in layers if world.rank < world.size // 2 else reversed(layers):
            loss = loss + layer(torch.full((1, 4), 2.0**number)).sum()
        loss.backward()
        for number, parameter in enumerate(model.parameters()):
            expected = 2.0**number * (expert_group if number > 3 else group).size
            if reducer.shards[0] is None:
                assert parameter.grad.unique().tolist() == [expected]
        for bucket, own in zip(reducer.buckets, reducer.shards, strict=True):
            size = (expert_group if bucket.expert else group).size
            assert own is None or own.unique().tolist() == [2.0 ** bucket.slots[0].index * size]


@ranks(2)
@pytest.mark.parametrize("shards", [False, True])
def test_messages_of_both_kinds_over_the_same_ranks_do_not_cross(shards):
    _both_kinds(_world(), _world(), shards=shards, keep_full=not shards)


@ranks(4)
@pytest.mark.parametrize("shards", [False, True])
def test_ranks_do_not_wait_for_each_other_across_kinds(shards):
    mesh = Mesh(dp=4, ep=2, timeout=timedelta(seconds=20))
    groups = mesh.group("dp"), mesh.expert.group("edp")
    _both_kinds(*groups, shards=shards, keep_full=not shards)


class _Slow(torch.autograd.Function):
    """A layer whose backward takes its time."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(_Slow.apply(x))
        return x


@ranks(2)
def test_messages_travel_while_backward_goes_on():
    """With 20 ms a layer and 15 ms a message, all but the last ones hide behind layers."""
    model = _Layers()
    reducer = Reducer(marks(model), group=_world(), bucket_bytes=80)
    assert len(reducer.buckets) == 6
    waits = []

    class Late:
        """A message that takes 15 ms, whoever waits for it."""

        def __init__(self, buffer, **options):
            self.handle, self.buffer = messages.start_all_reduce_(buffer, **options), buffer
            self.due = time.perf_counter() + 0.015

        def wait(self):
            pause = self.due - time.perf_counter()
            if self.buffer.dtype.is_floating_point:
                waits.append(pause > 0)
            time.sleep(max(pause, 0))
            self.handle.wait()

    bucket_messages.start_all_reduce_ = Late
    try:
        for _ in range(2):
            waits.clear()
            model(torch.ones(1, 4)).sum().backward()
    finally:
        bucket_messages.start_all_reduce_ = messages.start_all_reduce_
    assert waits[:5] == [False] * 5


@ranks(2)
def test_ranks_that_use_parameters_in_another_order_agree():
    """Backward reaches layers in opposite orders on both ranks; sizes are equal on purpose."""
    group = _world()
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False).double() for _ in range(4)])
    reducer = Reducer(marks(layers), group=group, bucket_bytes=128, reduction="sum")
    assert len(reducer.buckets) == 4
    for _ in range(3):
        layers.zero_grad()
        x = torch.ones(1, 4, dtype=torch.float64)
        order = range(4) if group.rank == 0 else reversed(range(4))
        loss = torch.zeros(())
        for index in order:
            y = layers[index](x * (index + 1))
            loss = loss + y.sum()
        loss.backward()
        for index, weight in enumerate(layers.parameters()):
            assert weight.grad.unique().tolist() == [2.0 * (index + 1)]


@ranks(2, 4)
def test_a_rank_on_which_nothing_is_used_takes_part():
    group = _world()
    layer = nn.Linear(2, 2, bias=False)
    reducer = Reducer(marks(layer), group=group, reduction="sum")
    for _ in range(2):
        layer.weight.grad = None
        x = torch.ones(1, 2, requires_grad=True)
        y = layer(x) if group.rank == 0 else x * 2
        reducer.watch({"out": [y]})
        y.sum().backward()
        gradient = layer.weight.grad
        assert gradient is not None and (gradient == 1.0).all()


@ranks(2)
def test_gradients_that_are_only_asked_for_send_nothing():
    group = _world()
    model = _model()
    reducer = Reducer(marks(model), group=group)
    model(_x(group)[group.rank]).sum().backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    with _sent() as sent:
        for wanted in (x, model[0].weight):
            y = model(x)
            reducer.watch(y)
            (found,) = torch.autograd.grad(y.sum(), wanted)
            assert found.any()
        y = model(x)
        reducer.watch(y)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert not sent
    assert slope.requires_grad
    for parameter, before in zip(model.parameters(), kept, strict=True):
        assert torch.equal(parameter.grad, before)


@ranks(2)
def test_a_nested_backward_adds_up():
    """A layer used in two regions that recompute by a backward of their own."""
    group = _world()
    model, twin = _model(2), _model(2)
    reducer = Reducer(marks(model), group=group, bucket_bytes=200)
    x = _x(group)
    for _ in range(3):
        for one in (model, twin):
            one.zero_grad()
        own = x[group.rank].clone().requires_grad_()
        y = checkpoint(model[0], own, use_reentrant=True)
        y = checkpoint(model, y, use_reentrant=True)
        reducer.watch(y)
        y.square().sum().backward()
        whole = twin(twin[0](x))
        (whole.square().sum() / group.size).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)


@ranks(2)
def test_one_more_gradient_after_a_bucket_was_sent_is_refused():
    group = Mesh(dp=2, timeout=timedelta(seconds=20)).group("dp")
    model = _model(1)
    reducer = Reducer(marks(model), group=group)
    own = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    for times in (1, 2):
        y = own
        for _ in range(times):
            y = checkpoint(model, y, use_reentrant=True)
        reducer.watch(y)
        if times == 1:
            y.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="0.bias.* got another gradient"):
                y.sum().backward()


@ranks(2)
def test_an_error_between_forward_and_backward_costs_nothing():
    group = _world()
    model = _model()
    reducer = Reducer(marks(model), group=group)
    for step in range(3):
        model.zero_grad()
        reducer.check()
        y = model(_x(group)[group.rank])
        reducer.watch(y)
        if step == 1:
            continue  # as after an error that was caught
        y.square().sum().backward()
        twin = _model()
        _whole_gradients(twin, _x(group), group.size)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("broken here")


@ranks(2)
def test_an_error_in_backward_ends_all_ranks_and_the_next_backward_is_refused():
    group = Mesh(dp=2, timeout=timedelta(seconds=3)).group("dp")
    model = _model()
    reducer = Reducer(marks(model), group=group, bucket_bytes=200)
    x = torch.ones(1, 4, dtype=torch.float64)
    model(x).sum().backward()
    y = model[1:](_Raises.apply(model[0](x))) if group.rank == 1 else model(x)
    expected = (
        pytest.raises(ArithmeticError, match="broken here")
        if group.rank == 1
        else pytest.raises(RuntimeError, match="a rank has died, raised in backward")
    )
    with expected:
        y.sum().backward()
    with pytest.raises(RuntimeError, match="broken off by an error"):
        reducer.check()
    y = model(x)
    reducer.watch(y)
    with pytest.raises(RuntimeError, match="broken off by an error"):
        y.sum().backward()


@ranks(2)
def test_leaves_that_come_out_again_and_again_are_hooked_once():
    model = _model(1)
    reducer = Reducer(marks(model), group=_world())
    x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        outputs = model(x), model[0].weight, x
        reducer.watch(outputs)
        torch.cat(outputs).sum().backward()
    assert len(model[0].weight._backward_hooks) == len(x._backward_hooks) == 1


@ranks(2)
def test_hooks_that_would_see_gradients_too_early_are_named():
    model = _model()
    reducer = Reducer(marks(model), group=_world())
    handle = model[2].bias.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(RuntimeError, match=r"'2\.bias' must have no hook"):
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    del reducer
    with pytest.raises(ValueError, match=r"'2\.bias' must have no hook"):
        Reducer(marks(model), group=_world())
    handle.remove()
    Reducer(marks(model), group=_world())


@ranks(2)
def test_what_cannot_be_reduced_is_named():
    group = _world()
    embedding = nn.Embedding(3, 2, sparse=True)
    reducer = Reducer(marks(embedding), group=group)
    with pytest.raises(RuntimeError, match="'weight' cannot be reduced: a sparse gradient"):
        embedding(torch.tensor([1])).sum().backward()
    model = _model()
    reducer = Reducer(marks(model), group=group)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward(create_graph=True)
    del reducer


@ranks(2)
def test_f052_a_gradient_has_one_reducer():
    group = _world()
    model = _model()
    first = Reducer(marks(model), group=group)
    with pytest.raises(ValueError, match=r"'0\.weight' has its gradient reduced by another"):
        Reducer(marks(model), group=group, shards=True)
    first.remove()
    second = Reducer(marks(model), group=group, shards=True)
    del second
    with CommDebugMode() as traffic:
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert traffic.get_total_counts() == 0
    assert model[0].weight.grad is not None


def test_alone_there_is_no_hook():
    model = _model()
    assert Reducer(marks(model), group=LOCAL).parameters == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "average"}, "reduction='average' must be"),
        ({"group": None}, "group=None must be a Group"),
        ({"expert_group": "edp"}, "expert_group='edp' must be a Group"),
        ({"replicate": 1}, "replicate=1 must be a Group"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype=torch.int32 must be"),
        ({"wire_dtype": torch.float32}, "wire_dtype=torch.float32 must be"),
        ({"bucket_bytes": 0, "shards": True}, "bucket_bytes=0 must be"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Reducer(marks(_model()), **{"group": LOCAL, **options})
