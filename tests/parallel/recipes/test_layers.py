"""Rounded layers are the plain ones where nothing is rounded, and one process at any size."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from megablocks_core.ckpt import load, save
from megablocks_core.groups import LOCAL, Mesh, Segment, gather_from, gather_whole, scatter_to
from megablocks_core.parallel import (
    ColumnParallelLinear,
    DataParallel,
    RowParallelLinear,
    ShardedOptimizer,
    add_lora,
    fully_shard,
    recompute,
)
from megablocks_core.parallel.recipes import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipes,
    emulated_linear_factory,
)
from megablocks_core.parallel.recipes.layers import EmulatedColumnLinear, EmulatedRowLinear
from megablocks_core.parallel.recipes.rounding import block_length
from megablocks_core.parallel.recipes.torchao import torchao_linear_factory
from megablocks_core.testing import ranks

ALL = [DelayedScaling(amax_history_len=3), CurrentScaling(), BlockScaling(), MXFP8(), NVFP4()]


def layer(mode, recipe, group=LOCAL, sizes=(64, 64), **options):
    torch.manual_seed(0)
    made: Any = emulated_linear_factory(
        *sizes, parallel_mode=mode, group=group, dtype=torch.float64, **options
    )
    made.recipe = recipe
    return made


def run(module, x, dy):
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    return y.detach(), x.grad


@pytest.mark.parametrize("mode", ["column", "row"])
def test_without_a_recipe_it_is_the_plain_layer(mode):
    kind = {"column": ColumnParallelLinear, "row": RowParallelLinear}[mode]
    torch.manual_seed(0)
    plain = kind(6, 4)
    torch.manual_seed(0)
    made = emulated_linear_factory(6, 4, parallel_mode=mode)
    assert list(made.state_dict()) == list(plain.state_dict())
    x = torch.randn(3, 6)
    assert torch.equal(made(x), plain(x))


@ranks(1, 2, 4)
def test_layers_are_one_process_at_any_size():
    tp = Mesh(tp=dist.get_world_size()).group("tp")
    generator = torch.Generator().manual_seed(0)
    wide, narrow = (torch.randn(2, 8, size, generator=generator).double() for size in (512, 24))
    for recipe in ALL:
        # The least that four ranks can cut.
        cut = wide[..., : 4 * max(block_length(recipe), 8)]
        for mode in ("column", "row"):
            x, dy = (narrow, cut) if mode == "column" else (cut, narrow)
            sizes = (x.shape[-1], dy.shape[-1])
            for sequence_parallel in (False, True):
                whole = layer(mode, recipe, sizes=sizes)
                part = layer(mode, recipe, tp, sizes, sequence_parallel=sequence_parallel)
                own_x, own_dy, join_y, join_x = _cuts(mode, sequence_parallel, tp)
                for _ in range(2):
                    y, dx = run(whole, x, dy)
                    own_y, own_dx = run(part, own_x(x), own_dy(dy))
                    assert_close(join_y(own_y), y)
                    assert_close(join_x(own_dx), dx)
                    gradients = _gathered_gradients(part)
                    assert_close(gradients["weight"], whole.weight.grad)
                    assert_close(gradients["bias"], whole.bias.grad)
                for name, value in whole.named_buffers():
                    assert_close(part.get_buffer(name), value)


def _cuts(mode, sequence_parallel, tp):
    """How this rank's input and gradient come from whole ones, and whole results from its own."""

    def cut(dim):
        return lambda x: scatter_to(x, dim=dim, group=tp)

    def joined(dim):
        return lambda x: gather_from(x, dim=dim, group=tp)

    def same(x):
        return x

    outside = (cut(-2), joined(-2)) if sequence_parallel else (same, same)
    if mode == "column":
        return outside[0], cut(-1), joined(-1), outside[1]
    return cut(-1), outside[0], outside[1], joined(-1)


def _gathered_gradients(module):
    copy_of = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        copy_of.get_parameter(name).data = parameter.grad
    return gather_whole(copy_of)


@ranks(2)
def test_packed_parts_and_gathered_outputs():
    tp = Mesh(tp=2).group("tp")
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).double()
    parts = (Segment(64), Segment(128))
    options = {"sizes": (64, 192), "segments": parts}
    for recipe in (MXFP8(square_weights=True), NVFP4()):
        whole, part = layer("column", recipe, **options), layer("column", recipe, tp, **options)
        part.gather_output = True
        dy = torch.randn(16, 192, generator=torch.Generator().manual_seed(1)).double()
        (y, dx), (own_y, own_dx) = run(whole, x, dy), run(part, x, dy)
        assert_close(own_y, y)
        assert_close(own_dx, dx)
        assert_close(_gathered_gradients(part)["weight"], whole.weight.grad)
    # Rows of a whole input are cut here.
    whole = layer("row", MXFP8(), sizes=(64, 8))
    torch.manual_seed(0)
    part = EmulatedRowLinear(64, 8, input_is_parallel=False, group=tp, dtype=torch.float64)
    part.recipe = MXFP8()
    assert_close(part(x), whole(x))


@ranks(2)
def test_a_cut_inside_a_block_is_refused():
    tp = Mesh(tp=2).group("tp")
    for mode, sizes in (("column", (64, 96)), ("row", (96, 64))):
        made = layer(mode, None, tp, sizes=sizes)
        with pytest.raises(ValueError, match="blocks of 32, which must lie on one rank"):
            made.recipe = MXFP8()
        assert made.recipe is None
        made.recipe = NVFP4()
        made.recipe = CurrentScaling()
    packed = layer("column", None, tp, sizes=(64, 128), segments=(Segment(32), Segment(96)))
    with pytest.raises(ValueError, match="cuts of dimension 0 over 2 ranks"):
        packed.recipe = MXFP8()


def test_adapters_stay_in_the_models_dtype():
    for mode in ("column", "row"):
        made = layer(mode, MXFP8(), sizes=(64, 32))
        x = torch.randn(5, 64).double()
        before = made(x)
        add_lora(nn.ModuleDict({"a": made}), "a", rank=4, alpha=8)
        assert torch.equal(made(x), before)
        with torch.no_grad():
            made.adapter.b.weight.normal_()
        added = 2 * (x @ made.adapter.a.weight.t() @ made.adapter.b.weight.t())
        assert_close(made(x), before + added)


def test_a_state_goes_on_from_a_checkpoint_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(16, 64, generator=generator).double() for _ in range(2))
    for recipe in (DelayedScaling(amax_history_len=4), NVFP4()):
        first = layer("column", recipe, sizes=(64, 64))
        for factor in (1.0, 5.0, 0.2):
            run(first, factor * x, dy)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        again, fresh = layer("column", recipe, sizes=(64, 64)), copy.deepcopy(first)
        again.load_state_dict(torch.load(file))
        fresh.fp8.reset()
        results = []
        for module in (first, again, fresh):
            y, dx = run(module, x, dy)
            results.append((y, dx, module.weight.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))


def test_copies_pickles_and_new_values():
    made = layer("column", DelayedScaling(amax_history_len=2), sizes=(32, 32))
    x = torch.randn(16, 32).double()
    run(made, x, x)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert isinstance(other, EmulatedColumnLinear)
        assert other.recipe == made.recipe
        assert torch.equal(other.fp8.scale_fwd, made.fp8.scale_fwd)
        assert other.fp8.scale_fwd is not made.fp8.scale_fwd
    made.recipe = DelayedScaling(amax_history_len=2)
    assert made.fp8.scale_fwd[0] != 1  # an equal recipe keeps the state
    made.reset_parameters()
    assert made.fp8.scale_fwd.tolist() == [1.0, 1.0, 1.0]
    made.recipe = None
    assert list(made.state_dict()) == ["weight", "bias"]


def test_a_model_of_layers_is_recomputed_to_the_bit():
    torch.manual_seed(0)
    model = nn.Sequential(
        emulated_linear_factory(32, 64, parallel_mode="column"),
        nn.GELU(),
        emulated_linear_factory(64, 32, parallel_mode="row"),
    )
    Recipes({"0": DelayedScaling(), "2": NVFP4()}).apply(model)
    other = copy.deepcopy(model)
    x = torch.randn(16, 32)
    for _ in range(2):
        model(x).square().sum().backward()
        recompute(other, x).square().sum().backward()
    for (_, first), (_, second) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(first.grad, second.grad)
    for name, value in model.named_buffers():
        assert torch.equal(value, other.get_buffer(name))


@pytest.mark.parametrize("factory", [emulated_linear_factory, torchao_linear_factory])
def test_a_mode_that_is_none_is_refused_by_name(factory):
    with pytest.raises(ValueError, match="parallel_mode='rows' must be"):
        factory(16, 16, parallel_mode="rows")


def _two_layers(recipes, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        emulated_linear_factory(32, 64, parallel_mode="column", **options),
        nn.GELU(),
        emulated_linear_factory(64, 32, parallel_mode="row", **options),
    )
    Recipes(dict(zip("02", recipes, strict=True))).apply(model)
    return model


@pytest.mark.parametrize("recipes", [(DelayedScaling(), CurrentScaling()), (MXFP8(), NVFP4())])
def test_a_compiled_model_is_the_model_without_breaks(recipes):
    model = _two_layers(recipes)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 32)
    for factor in (1.0, 3.0):
        results = [run(each, factor * x, x) for each in (model, compiled)]
        assert_close(results[1], results[0])
    for name, parameter in model.named_parameters():
        assert_close(other.get_parameter(name).grad, parameter.grad)
    for name, value in model.named_buffers():
        assert_close(other.get_buffer(name), value)


@ranks(2)
def test_wrapped_models_learn_as_one_process():
    mesh = Mesh()
    dp = mesh.group("dp")
    recipes = (DelayedScaling(amax_history_len=2), CurrentScaling())
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).double()

    def learn(model, optimizer, x):
        for factor in (1.0, 4.0, 0.5):
            (factor * model(x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = _two_layers(recipes, dtype=torch.float64)
    learn(whole, torch.optim.SGD(whole.parameters(), lr=1e-4), x)
    for wrap in (fully_shard, DataParallel, None):
        inner = _two_layers(recipes, dtype=torch.float64)
        Recipes(dict(zip("02", recipes, strict=True))).apply(inner, mesh=mesh)
        if wrap is None:
            model = inner
            optimizer = ShardedOptimizer(inner, torch.optim.SGD, group=dp, reduction="sum", lr=1e-4)
        else:
            model = wrap(inner, group=dp, reduction="sum")
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        learn(model, optimizer, x.chunk(2)[dp.rank])
        assert_close(gather_whole(model), gather_whole(whole))


@ranks(2)
def test_scales_go_to_another_size_and_training_goes_on(tmp_path):
    tp, world = Mesh(tp=2).group("tp"), Mesh(tp=2).group("tp", "dp")
    recipes = (DelayedScaling(amax_history_len=3), DelayedScaling(amax_history_len=3))
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).double()
    first, second, third = (
        _two_layers(recipes, dtype=torch.float64, group=group) for group in (tp, LOCAL, tp)
    )
    for factor in (1.0, 4.0):
        run(first, factor * x, x)
    assert first.get_buffer("0.fp8.scale_fwd")[0] != 1
    for before, after, name in ((first, second, "a"), (second, third, "b")):
        save(tmp_path / name, {"model": before}, group=world)
        load(tmp_path / name, {"model": after}, group=world)
    for factor in (0.3, 2.0):
        expected, found = (run(model, factor * x, x) for model in (first, third))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert_close(run(second, factor * x, x), expected)
    for name, value in first.named_buffers():
        assert torch.equal(third.get_buffer(name), value), name
