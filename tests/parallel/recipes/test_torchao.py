"""torchao's products are the emulation's, but for the order of sums; what it lacks is refused."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import Mesh, gather_from
from megablocks_core.parallel.recipes import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipes,
    emulated_linear_factory,
    torchao_linear_factory,
)
from megablocks_core.parallel.recipes.torchao import _options
from megablocks_core.testing import ranks
from tests.parallel.recipes import fake_torchao

SERVED = [
    CurrentScaling(),
    CurrentScaling("e4m3", power_of_two_scales=True),
    DelayedScaling(amax_history_len=2),
]


@pytest.fixture(autouse=True)
def fresh_options():
    _options.cache_clear()
    yield
    _options.cache_clear()


def layers(recipe, dtype, mode="column", sizes=(32, 48), **options):
    made = []
    for factory in (emulated_linear_factory, torchao_linear_factory):
        torch.manual_seed(0)
        made.append(factory(*sizes, parallel_mode=mode, dtype=dtype, **options))
        made[-1].recipe = recipe
    return made


def results(layer, x, dy):
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    found: list[Any] = [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]
    return found


def assert_the_same(recipe, mode, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 32, generator=generator).to(dtype)
    dy = torch.randn(2, 5, 48, generator=generator).to(dtype)
    emulated, served = layers(recipe, dtype, mode)
    for _ in range(3):
        for a, b in zip(results(emulated, x, dy), results(served, x, dy), strict=True):
            assert (a - b).norm() <= tolerance * a.norm()
    for name, value in emulated.named_buffers():
        assert torch.equal(served.get_buffer(name), value)


TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("recipe", SERVED, ids=["current", "powers", "delayed"])
def test_results_are_those_of_the_emulation(recipe, mode, dtype):
    with fake_torchao.installed():
        assert_the_same(recipe, mode, dtype, TOLERANCES[dtype])


def test_no_tokens():
    with fake_torchao.installed():
        _, served = layers(CurrentScaling(), torch.float32)
        y, dx, dweight, _ = results(served, torch.zeros(0, 32), torch.zeros(0, 48))
    assert (y.shape, dx.shape) == ((0, 48), (0, 32))
    assert not dweight.any()


@ranks(2)
def test_it_is_one_process_over_two_ranks():
    tp = Mesh(tp=dist.get_world_size()).group("tp")
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    with fake_torchao.installed():
        whole = layers(CurrentScaling(), torch.float32, sizes=(32, 64))[1]
        part = layers(CurrentScaling(), torch.float32, sizes=(32, 64), group=tp)[1]
        torch.testing.assert_close(gather_from(part(x), dim=-1, group=tp), whole(x))


def test_what_it_does_not_serve_is_refused():
    with fake_torchao.installed():
        layer = torchao_linear_factory(32, 32, parallel_mode="column")
        for recipe in (MXFP8(), BlockScaling(), CurrentScaling(backward="high_precision")):
            with pytest.raises(ValueError, match="must be CurrentScaling or DelayedScaling"):
                layer.recipe = recipe
        odd = torchao_linear_factory(32, 40, parallel_mode="row")
        with pytest.raises(ValueError, match=r"shape \[40, 32\] must have sizes"):
            odd.recipe = CurrentScaling()
        assert layer.recipe is odd.recipe is None


def test_a_missing_package_is_named(monkeypatch):
    import sys

    for name in ("torchao", "torchao.float8", "torchao.float8.float8_training_tensor"):
        monkeypatch.setitem(sys.modules, name, None)
    model = nn.Sequential(torchao_linear_factory(32, 32, parallel_mode="column"))
    with pytest.raises(ImportError, match="layer '0': .*megablocks-core\\[ao\\]"):
        Recipes({"0": CurrentScaling()}).apply(model)
    assert model[0].recipe is None


needs_oracle = pytest.mark.skipif(find_spec("torchao") is None, reason="oracle transformer-engine")


@needs_oracle
@pytest.mark.parametrize("name", fake_torchao.NAMES)
def test_signatures_are_the_published_ones(name):
    real = import_module("torchao.float8.float8_training_tensor")
    theirs, ours = getattr(real, name), fake_torchao.NAMES[name]
    if name == "GemmInputRole":
        assert {role.name for role in ours} <= {role.name for role in theirs}
    elif name != "Float8TrainingTensor":
        theirs, ours = (list(inspect.signature(x).parameters) for x in (theirs, ours))
        assert ours == theirs


@needs_oracle
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("recipe", SERVED, ids=["current", "powers", "delayed"])
def test_the_real_package_computes_what_the_emulation_says(recipe, mode, dtype):
    assert_the_same(recipe, mode, dtype, TOLERANCES[dtype])
