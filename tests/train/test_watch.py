"""A watched model tells the numbers of one process, at a cost only when watched."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from megablocks_core.groups import (
    LOCAL,
    GradientShard,
    Group,
    Mesh,
    Segment,
    chunk_slice,
    gather_whole,
    load_whole,
    set_gradient_shard,
)
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import ColumnParallelLinear, reduce_gradients
from megablocks_core.testing import ranks
from megablocks_core.train import evaluate, watch

SPEC = DecoderSpec(97, 32, 48, 2, 4, 2, 8, qk_norm=True, attention_bias=True)
TOKENS = torch.arange(64).view(4, 16) * 7 % 97


def world():
    return Group.of(dist.group.WORLD) if dist.is_initialized() else LOCAL


def decoder(mesh=None, **options):
    torch.manual_seed(0)
    return Decoder(SPEC, mesh=mesh, dtype=torch.float64, **options)


def backward(model, tokens):
    logits = model(tokens, gather_logits=True).logits
    ((logits.sin() * torch.arange(97)).sum() / TOKENS.numel()).backward()


def numbers_of_one_process():
    model = decoder()
    watched = watch(model, activations="*")
    backward(model, TOKENS)
    watched.step()
    return watched.read()


def mlp(*, wrap=lambda layer, x: layer(x)):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.ReLU()).double() for _ in range(3)
            )

        def forward(self, x):
            for layer in self.layers:
                x = wrap(layer, x)
            return x

    return Stack()


def steps(model, watched, x, count=1):
    for _ in range(count):
        model.zero_grad()
        model(x).square().mean().backward()
        watched.step()


X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


def test_statistics_by_hand():
    model = mlp()
    watched = watch(model)
    steps(model, watched, X)
    found = watched.read()
    layer = model.get_submodule("layers.0")
    weight, output = model.get_parameter("layers.0.0.weight"), layer(X)
    for kind, name, watched_tensor in (
        ("gradient", "layers.0.0.weight", weight.grad),
        ("parameter", "layers.0.0.weight", weight),
        ("activation", "layers.0", output),
        ("activation", "layers.0.1", output),
    ):
        tensor = watched_tensor.detach()
        expected = {
            "norm": tensor.norm(),
            "mean": tensor.mean(),
            "rms": tensor.square().mean().sqrt(),
            "max_abs": tensor.abs().max(),
            "zeros": (tensor == 0).double().mean(),
            "nonfinite": 0.0,
        }
        for figure, value in expected.items():
            key = f"{kind}.{figure}/{name}"
            if key == f"activation.norm/{name}":
                assert key not in found
            else:
                assert found[key] == pytest.approx(float(value), rel=1e-12), key
    assert found["activation.zeros/layers.0"] > 0
    assert len(found) == 6 * 6 * 2 + 5 * 9  # 6 parameters twice, 3 layers and 2 layers in each


@ranks(1, 2, 4, timeout=180)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_numbers_are_those_of_one_process(sequence_parallel):
    """Two key heads are fewer than four ranks: what neighbours hold too counts once."""
    expected = numbers_of_one_process()
    mesh = Mesh(tp=world().size)
    model = decoder(mesh, sequence_parallel=sequence_parallel)
    watched = watch(model, activations="*", group=mesh.group("tp"))
    backward(model, TOKENS)
    watched.step()
    found = watched.read()
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value == pytest.approx(expected[key], rel=1e-9, abs=1e-12), key


@ranks(4, timeout=180)
def test_so_are_those_over_other_tokens_and_micro_batches():
    expected = numbers_of_one_process()
    mesh = Mesh(tp=2, dp=2)
    dp = mesh.group("dp")
    model = decoder(mesh)
    watched = watch(model, activations="*", group=mesh.group("tp", "dp"))
    for micro_batch in TOKENS.chunk(2)[dp.rank].split(1):
        backward(model, micro_batch)
    reduce_gradients(model, group=dp, reduction="sum")
    watched.step()
    found = watched.read()
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value == pytest.approx(expected[key], rel=1e-9, abs=1e-12), key


@ranks(1, 4)
def test_outputs_with_packed_heads_count_those_of_neighbours_once():
    """Packed q|k|v: each of two key heads is held twice, each query head once."""
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    packed = (Segment(8), Segment(4, parts=min(2, world().size)))
    column = nn.Sequential(
        ColumnParallelLinear(8, 12, segments=packed, group=world(), dtype=torch.float64)
    )
    whole = nn.Sequential(nn.Linear(8, 12, dtype=torch.float64))
    load_whole(whole, gather_whole(column))
    found = []
    for model, group in ((column, world()), (whole, LOCAL)):
        watched = watch(model, gradients=(), parameters=(), group=group)
        model(x)
        watched.step()
        found.append(watched.read())
    assert found[0] == pytest.approx(found[1], rel=1e-12)


@ranks(2)
def test_reading_sends_one_message_and_all_else_none():
    model = decoder(Mesh(tp=2))
    watched = watch(model, every=2, group=world())
    backward(model, TOKENS)
    with CommDebugMode() as traffic:
        watched.step()
        assert traffic.get_total_counts() == 0
        found = watched.read()
        assert traffic.get_total_counts() == 1
        assert watched.read() == {}
        watched.step()
        assert watched.read() == {}
    assert traffic.get_total_counts() == 1
    assert all(other == found for other in world().all_gather_object(found))


@ranks(2)
def test_a_watched_step_is_that_of_an_unwatched_model_to_the_last_bit():
    gradients = []
    for is_watched in (False, True):
        model = decoder(Mesh(tp=2))
        if is_watched:
            watch(model, group=world())
        backward(model, TOKENS)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


@ranks(2)
def test_ranks_that_hold_other_modules_tell_all_of_them():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    stage = nn.ModuleDict({str(world().rank): layers[world().rank]})
    watched = watch(stage, activations=(), group=world())
    watched.step()
    found = watched.read()
    for place, layer in enumerate(layers):
        norm = found[f"parameter.norm/{place}.weight"]
        assert norm == pytest.approx(layer.weight.norm().item())


@ranks(2)
def test_a_group_without_all_parts_is_refused():
    model = decoder(Mesh(tp=2))
    with pytest.raises(ValueError, match=r"group=\[0\] must include the ranks \[0, 1\] that hold"):
        watch(model)
    watch(model, gradients="*norm*", parameters=())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_backward_recomputes_counts_once(use_reentrant):
    """Of two micro-batches one is recomputed: counted twice, it would weigh more."""

    def some_again(layer, x):
        if x.shape[0] < 6:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    found = []
    for model in (mlp(), mlp(wrap=some_again)):
        watched = watch(model, activations="*")
        for micro_batch in (X.clone().requires_grad_(), 2 * X[:3]):
            model(micro_batch).square().mean().backward()
        watched.step()
        found.append(watched.read())
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_only_every_nth_step_is_watched_and_hooked():
    model = mlp()
    watched = watch(model, every=3, step=4)
    seen = []
    for _ in range(6):  # steps 4 to 9
        seen.append(any(module._forward_hooks for module in model.modules()))
        steps(model, watched, X)
        seen[-1] = (seen[-1], bool(watched.read()))
    nothing, watching = (False, False), (True, True)
    assert seen == [nothing, nothing, watching, nothing, nothing, watching]


def test_steps_between_reads_are_pooled():
    model = mlp()
    watched = watch(model, every=1)
    singles = []
    for x in (X, 2 * X):
        steps(model, watched, x)
        singles.append(watched.read())
    for x in (X, 2 * X):
        steps(model, watched, x)
    pooled = watched.read()
    for key, value in pooled.items():
        pair = [single[key] for single in singles]
        if ".norm/" in key or ".rms/" in key:
            expected = (sum(each**2 for each in pair) / 2) ** 0.5
        else:
            expected = max(pair) if "max_abs" in key else sum(pair) / 2
        assert value == pytest.approx(expected, rel=1e-12), key


def test_evaluation_between_steps_is_not_counted():
    model = mlp()
    found = []
    for batches in ([], [{"x": 9 * X}]):
        watched = watch(model)
        if batches:
            evaluate(model, batches, loss=lambda model, batch: (model(batch["x"]).sum(), 1))
        steps(model, watched, X)
        found.append(watched.read())
    assert found[0] == found[1]


def test_patterns_choose():
    model = mlp()
    watched = watch(
        model, gradients="*.0.bias", parameters=(), activations=("layers.1", "layers.2.*")
    )
    steps(model, watched, X)
    names = {key.split("/")[1] for key in watched.read()}
    assert names == {
        *(f"layers.{place}.0.bias" for place in range(3)),
        *("layers.1", "layers.2.0", "layers.2.1"),
    }


def test_a_parameter_without_gradient_has_no_gradient_statistics():
    model = mlp()
    model.layers[1].requires_grad_(False)
    watched = watch(model)
    steps(model, watched, X)
    found = watched.read()
    assert "gradient.norm/layers.1.0.weight" not in found
    assert "parameter.norm/layers.1.0.weight" in found


def test_a_removed_watch_leaves_nothing():
    model = mlp()
    before = model.state_dict().keys()
    watched = watch(model)
    assert model.state_dict().keys() == before
    model(X)
    watched.remove()
    steps(model, watched, X, 2)
    assert watched.read() == {} and not any(module._forward_hooks for module in model.modules())


def test_a_watched_model_can_be_copied_and_pickled():
    model = mlp()
    watch(model)
    assert torch.equal(copy.deepcopy(model)(X), model(X))
    linear = nn.Sequential(nn.Linear(2, 2))
    watch(linear)
    assert pickle.loads(pickle.dumps(linear))[0].in_features == 2


def test_outputs_that_are_not_one_tensor():
    class Pair(nn.Module):
        def forward(self, x):
            return (x, None)

    class Words(nn.Module):
        def forward(self, x):
            return {"x": x}

    model = nn.ModuleList([Pair(), Words(), nn.Identity()])
    watched = watch(model)
    for layer, x in zip(model, (X, X, torch.arange(3)), strict=True):
        layer(x)
    watched.step()
    assert {key.split("/")[1] for key in watched.read()} == {"0"}


def test_nothing_waits_for_the_device_until_read():
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        watched = watch(model, every=1)
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            watched.step()
        with pytest.raises(DataDependentOutputException):
            watched.read()


def test_no_tensor_outlives_a_step():
    model = mlp()
    watched = watch(model, every=1)
    steps(model, watched, X)
    table = watched._table
    shape = table.shape
    steps(model, watched, X, 3)
    assert watched._table is table and table.shape == shape


def test_a_compiled_model_is_watched_as_a_whole():
    model = nn.Sequential(mlp(), nn.Identity())
    model[0] = torch.compile(model[0], backend="aot_eager", fullgraph=True)
    watched = watch(model)
    steps(model, watched, X)
    found = watched.read()
    assert found["activation.rms/0"] == pytest.approx(model(X).square().mean().sqrt().item())
    assert "gradient.norm/0.layers.0.0.weight" in found
    assert not any(key.startswith("activation") and "/0.layers" in key for key in found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"every": 0}, "every=0 must be a whole number of at least 1"),
        ({"every": float("nan")}, "every=nan must be a whole number of at least 1"),
        ({"gradients": "*.wieght"}, "gradient pattern '\\*.wieght' must match the name of a param"),
        ({"activations": ["*", "head"]}, "activation pattern 'head' must match .* a module"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        watch(mlp(), **arguments)


@ranks(4)
def test_ranges_of_gradients_have_the_statistics_of_whole_ones():
    group, half = world(), Mesh(dp=4).split("dp", inner=2)[0]
    for among in (group, half):
        model = torch.nn.Linear(3, 2, bias=False)
        values = torch.tensor([[3.0, 0.0, 1.0], [-5.0, 2.0, 0.0]])
        watched = watch(model, every=1, parameters=(), activations=(), group=group)
        model.weight.grad = values
        watched.step()
        expected = watched.read()
        model.weight.grad = None
        part = chunk_slice(6, among.size, among.rank)
        set_gradient_shard(
            model.weight, GradientShard(values.view(-1)[part].clone(), part.start, among)
        )
        watched.step()
        assert watched.read() == expected
