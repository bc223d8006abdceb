"""Linear layers of Transformer Engine are ours: names, marks, values, messages, every gradient."""

import copy
import pickle
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.ckpt import load, save
from megablocks_core.groups import LOCAL, Mesh, Segment, gather_from, gather_whole, marks
from megablocks_core.parallel import (
    ColumnParallelLinear,
    DataParallel,
    RowParallelLinear,
    fully_shard,
    recipes,
)
from megablocks_core.parallel.initial import reset_parameters
from megablocks_core.parallel.recipes import MXFP8, DelayedScaling
from megablocks_core.parallel.transformer_engine import linear
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.parallel.transformer_engine import fake
from tests.parallel.transformer_engine.fake import fixture as fixture
from tests.parallel.transformer_engine.fake_quantization import FP8GlobalStateManager, autocast
from tests.parallel.transformer_engine.fake_recipe import MXFP8BlockScaling

KINDS = {"column": ColumnParallelLinear, "row": RowParallelLinear}
DOUBLE = {"dtype": torch.float64}


def pair(mode, *, group=LOCAL, inputs=8, outputs=12, **options):
    """A layer of theirs and one of ours, of one seed."""
    options = {**DOUBLE, **options}
    torch.manual_seed(3)
    theirs = linear(inputs, outputs, parallel_mode=mode, group=group, **options)
    torch.manual_seed(3)
    return theirs, KINDS[mode](inputs, outputs, group=group, **options)


def assert_same(theirs, ours, x):
    """Bits of the values; outputs and all gradients in float64."""
    torch.testing.assert_close(dict(theirs.state_dict()), dict(ours.state_dict()), rtol=0, atol=0)
    results = []
    for layer in (theirs, ours):
        x = x.detach().clone().requires_grad_()
        y = layer(x)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
        grads = {name: each.grad for name, each in layer.named_parameters()}
        results.append({"y": y.detach(), "x": x.grad, **grads})
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_one_process(te, mode, bias):
    theirs, ours = pair(mode, bias=bias)
    assert_same(theirs, ours, torch.randn(2, 5, 8, **DOUBLE))
    assert_same(theirs, ours, torch.randn(4, 8, **DOUBLE))


@ranks(1, 2, 4)
def test_over_ranks_it_is_ours():
    group = Mesh(tp=dist.get_world_size()).group("tp")
    with fake.installed():
        for mode in KINDS:
            for sequence_parallel in (False, True):
                theirs, ours = pair(mode, group=group, sequence_parallel=sequence_parallel)
                width = 8 if mode == "column" else 8 // group.size
                torch.manual_seed(5 + (group.rank if mode == "row" or sequence_parallel else 0))
                for shape in [(4, width), (2, 4, width)]:
                    assert_same(theirs, ours, torch.randn(shape, **DOUBLE))


@ranks(2, 4)
def test_over_ranks_it_is_one_process():
    group = Mesh(tp=dist.get_world_size()).group("tp")

    def features(inputs):
        return tuple(x.chunk(group.size, dim=-1)[group.rank] for x in inputs)

    def whole(y):
        return gather_from(y, dim=-1, group=group)

    with fake.installed():
        for mode in KINDS:
            assert_parallel_equivalence(
                lambda tp, mode=mode: linear(8, 12, parallel_mode=mode, group=tp, **DOUBLE),
                (torch.randn(4, 8, **DOUBLE),),
                group=group,
                loss=lambda y: y.square().sum(),
                split=None if mode == "column" else features,
                join=whole if mode == "column" else None,
            )


@ranks(4)
def test_slices_that_neighbours_hold_too_sum_their_gradients():
    group = Mesh(tp=4).group("tp")
    with fake.installed():
        segments = (Segment(8), Segment(4, parts=2))
        for sequence_parallel in (False, True):
            options = {"segments": segments, "sequence_parallel": sequence_parallel}
            theirs, ours = pair("column", group=group, **options)
            assert [specs for *_, specs in marks(theirs)] == [specs for *_, specs in marks(ours)]
            torch.manual_seed(group.rank if sequence_parallel else 0)
            assert_same(theirs, ours, torch.randn(2, 3, 8, **DOUBLE))


@ranks(2)
def test_messages_are_those_of_ours():
    group = Mesh(tp=2).group("tp")
    with fake.installed():
        for mode, sequence_parallel in (("column", False), ("row", False), ("row", True)):
            counts = []
            for layer in pair(mode, group=group, sequence_parallel=sequence_parallel):
                x = torch.randn(4, 8 if mode == "column" else 4, requires_grad=True, **DOUBLE)
                with CommDebugMode() as traffic:
                    layer(x).sum().backward()
                counts.append(traffic.get_total_counts())
            assert counts[0] == counts[1], (mode, sequence_parallel)


def test_copies_and_pickles_compute_the_same(te):
    layer, _ = pair("row")
    x = torch.randn(3, 8, **DOUBLE)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), layer(x))
        assert copied.engine.module() is not layer.engine.module()


@ranks(2)
def test_over_ranks_copies_compute_the_same():
    group = Mesh(tp=2).group("tp")
    with fake.installed():
        layer, _ = pair("column", group=group)
        x = torch.randn(3, 8, **DOUBLE)
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_the_engine_holds_no_values_between_calls(te):
    layer, _ = pair("column")
    layer(torch.randn(3, 8, **DOUBLE)).sum().backward()
    assert all(each.is_meta for each in layer.engine.module().parameters())
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias"}
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_values_come_by_key_after_meta(te):
    layers = [linear(8, 12, parallel_mode="row", device="meta"), linear(8, 12, parallel_mode="row")]
    layers[0].to_empty(device="cpu")
    ours = RowParallelLinear(8, 12)
    for layer in (*layers, ours):
        reset_parameters(layer, seed=11)
    for layer in layers:
        torch.testing.assert_close(layer.state_dict(), ours.state_dict(), rtol=0, atol=0)


@ranks(4)
def test_checkpoints_go_between_layouts_and_to_ours(tmp_path):
    whole = Mesh(tp=4).group("tp")
    with fake.installed():
        torch.manual_seed(1)
        before = linear(8, 12, parallel_mode="column", group=Mesh(tp=2, dp=2).group("tp"))
        save(tmp_path / "a", {"layer": before}, group=Mesh(dp=4).group("dp"))
        after = linear(8, 12, parallel_mode="column", group=whole)
        with torch.no_grad():
            after.weight.zero_()
        load(tmp_path / "a", {"layer": after}, group=Mesh(dp=4).group("dp"))
        ours = ColumnParallelLinear(8, 12, group=LOCAL)
        load(tmp_path / "a", {"layer": ours}, group=Mesh(dp=4).group("dp"))
        part = ours.weight[3 * whole.rank : 3 * whole.rank + 3]
        torch.testing.assert_close(after.weight, part, rtol=0, atol=0)


def test_what_cannot_be_says_so(te):
    with pytest.raises(ValueError, match="parallel_mode='both' must be"):
        linear(8, 8, parallel_mode="both")  # pyright: ignore[reportArgumentType]
    layer = linear(8, 8, parallel_mode="row")
    with pytest.raises(ValueError, match="recipe='fp8' must be a recipe"):
        layer.recipe = "fp8"  # pyright: ignore[reportAttributeAccessIssue]
    layer.recipe = DelayedScaling()
    with pytest.raises(ValueError, match="must run within autocast"):
        layer(torch.randn(16, 8))


def test_without_transformer_engine_the_extra_is_named(monkeypatch):
    for name in ["transformer_engine", "transformer_engine.pytorch"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"Linear needs transformer_engine: .*core\[te\]"):
        linear(8, 8, parallel_mode="row")


@ranks(2)
def test_tokens_that_do_not_divide_are_refused():
    group = Mesh(tp=2).group("tp")
    with fake.installed():
        layer = linear(8, 8, parallel_mode="row", sequence_parallel=True, group=group)
        with pytest.raises(ValueError, match="divide evenly over a group of 2 ranks"):
            layer(torch.randn(3, 4))


def test_a_layer_without_a_recipe_stays_out_of_autocast(te):
    layer, ours = pair("column")
    with autocast(recipe=MXFP8BlockScaling()):
        assert_same(layer, ours, torch.randn(3, 8, **DOUBLE))
        layer.recipe = MXFP8()
        assert not torch.equal(layer(x := torch.randn(3, 8, **DOUBLE)), ours(x))


def _mlp(group=LOCAL):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        linear(16, 32, parallel_mode="column", group=group, **DOUBLE),
        torch.nn.SiLU(),
        linear(32, 16, parallel_mode="row", group=group, **DOUBLE),
    )


@ranks(2, 4)
def test_a_rounded_model_over_ranks_is_that_of_one_process():
    recipe, runs = DelayedScaling(amax_history_len=2), []
    with fake.installed():
        for group in (LOCAL, Mesh(tp=dist.get_world_size()).group("tp")):
            FP8GlobalStateManager.reset()
            model, run = _mlp(group), {}
            for layer in (model[0], model[2]):
                layer.recipe = recipe  # pyright: ignore[reportAttributeAccessIssue]
            for step in range(3):
                torch.manual_seed(step)
                with recipes.autocast(recipe):
                    y = model(torch.randn(16, 16, **DOUBLE) * (step + 1))
                y.square().sum().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter -= 1e-3 * parameter.grad
                        parameter.grad = None
                run[f"y{step}"] = y.detach()
            runs.append(run | {name: each.clone() for name, each in model.named_buffers()})
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-8)
    assert all(scale > 1 for scale in runs[0]["0.fp8.scale_fwd"][:2])


@ranks(2)
def test_wrapped_for_data_parallelism_a_model_trains_as_one():
    dp = Mesh(dp=2).group("dp")
    with fake.installed():
        whole = _mlp()
        x = torch.randn(4, 16, **DOUBLE)
        whole(x).square().sum().backward()
        with torch.no_grad():
            for parameter in whole.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        for wrap in (fully_shard, DataParallel):
            model = wrap(_mlp(), group=dp, reduction="sum")
            model(x.chunk(2)[dp.rank]).square().sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            torch.testing.assert_close(gather_whole(model), gather_whole(whole))
