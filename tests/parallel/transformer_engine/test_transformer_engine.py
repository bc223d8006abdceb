"""What is asked of Transformer Engine is what it has, and the stand-in for it has no more.

Run where ``tools/oracles.sh transformer-engine`` has installed it: the oracle transformer-engine.
"""

import dataclasses
from enum import Enum
from importlib import import_module
from inspect import signature
from unittest import mock

import pytest
import torch

from megablocks_core.layers.moe.experts.transformer_engine import grouped_experts
from megablocks_core.parallel.recipes import CurrentScaling, DelayedScaling
from megablocks_core.parallel.recipes.transformer_engine import to_transformer_engine
from megablocks_core.parallel.transformer_engine import (
    grouped_linear,
    layer_norm,
    linear,
    norm_linear,
    rms_norm,
)
from megablocks_core.parallel.transformer_engine.scales import Scales
from tests.layers.ssm.backends.published import record_of
from tests.parallel.transformer_engine import fake, fake_quantization, fake_recipe, real

BUILT = {
    "linear": lambda: linear(16, 32, parallel_mode="column"),
    "row": lambda: linear(16, 32, parallel_mode="row", bias=False),
    "rms_norm": lambda: rms_norm(16, zero_centered=True),
    "layer_norm": lambda: layer_norm(16),
    "norm_linear": lambda: norm_linear(16, 32),
    "layer_norm_linear": lambda: norm_linear(16, 32, normalization="layer", bias=False),
    "grouped_linear": lambda: grouped_linear(2, 16, 32),
}


def engines():
    """Every kind of engine that ours builds, by name."""
    found = {name: build().engine for name, build in BUILT.items()}
    experts = grouped_experts(2, 16, 32, bias=True)
    return found | {f"experts.{name}": engine for name, engine in experts.engines.items()}


def outline(engine):
    module = engine.module()
    return {name: tuple(each.shape) for name, each in module.named_parameters()}


@real.needs_oracle
@pytest.mark.parametrize("kind", fake.MODULES, ids=lambda kind: kind.__name__)
def test_modules_take_the_published_arguments(kind):
    with real.imported() as package:
        published = getattr(package, kind.__name__)
        assert record_of(kind.__init__) == record_of(published.__init__)
        assert record_of(kind.forward) == record_of(published.forward)


@real.needs_oracle
def test_contexts_take_the_published_arguments():
    with real.imported() as package:
        assert record_of(fake_quantization.autocast) == record_of(package.autocast)
        found = fake_quantization.quantized_model_init
        assert record_of(found) == record_of(package.quantized_model_init)
        theirs = import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
        ours = fake_quantization.FP8GlobalStateManager
        for name in ("is_fp8_enabled", "with_fp8_parameters", "get_fp8_recipe", "get_fp8_group"):
            assert record_of(getattr(ours, name)) == record_of(getattr(theirs, name))
        base = import_module("transformer_engine.pytorch.module.base")
        published = base.TransformerEngineBaseModule.init_fp8_metadata
        assert record_of(fake.Linear.init_fp8_metadata) == record_of(published)


@real.needs_oracle
@pytest.mark.parametrize("name", fake_recipe.NAMES)
def test_recipes_have_the_published_fields(name):
    with real.imported():
        published = getattr(import_module("transformer_engine.common.recipe"), name)
        ours = getattr(fake_recipe, name)
        if issubclass(ours, Enum):
            assert {each.name: each.value for each in ours} == {
                each.name: tuple(each.value) for each in published
            }
        elif dataclasses.is_dataclass(ours):
            assert _fields(ours) == _fields(published)


def _fields(kind):
    parameters = signature(kind).parameters.values()
    return {each.name: _plain(each.default) for each in parameters}


def _plain(value):
    if isinstance(value, Enum):
        return value.name
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


@real.needs_oracle
def test_real_modules_are_built_with_the_same_parameters():
    with fake.installed():
        expected = {name: outline(engine) for name, engine in engines().items()}
    with real.imported():
        found = {name: outline(engine) for name, engine in engines().items()}
    assert found == expected


@real.needs_oracle
def test_real_modules_compute_with_what_they_are_handed():
    with real.imported():
        for name, build in BUILT.items():
            layer, seen = build(), {}
            module = layer.engine.module()

            def forward(*inputs, seen=seen, module=module):
                seen |= dict(module.named_parameters())
                held = vars(module).items()
                assert not any(isinstance(each, torch.Tensor) and each.is_meta for _, each in held)
                return inputs[0]

            counts = ([3, 1],) if name == "grouped_linear" else ()
            with mock.patch.object(module, "forward", forward):
                layer(torch.ones(4, 16), *counts)
            assert seen.keys() == outline(layer.engine).keys()
            assert all(not each.is_meta for each in seen.values())
            assert all(each.is_meta for each in module.parameters())


@real.needs_oracle
def test_scales_are_shared_with_what_real_quantizers_read():
    with real.imported():
        quantization = import_module("transformer_engine.pytorch.quantization")
        scales, meta = Scales(4), {}
        torch.nn.init.constant_(scales.scale_fwd, 3)
        for key, mode, count in (("scaling_fwd", "forward", 3), ("scaling_bwd", "backward", 2)):
            meta[key] = quantization.DelayedScalingRecipeState(
                to_transformer_engine(DelayedScaling(amax_history_len=4)),
                mode=mode,
                num_quantizers=count,
                device=torch.device("cpu"),
            )
        quantizers = meta["scaling_fwd"].make_quantizers()
        scales.share_with(meta)
        assert [float(each.scale) for each in quantizers] == [3, 3, 3]
        scales.load_state_dict({name: each + 2 for name, each in scales.state_dict().items()})
        assert [float(each.scale) for each in quantizers] == [5, 5, 5]
        assert [float(each.amax) for each in quantizers] == [2, 2, 2]


@real.needs_oracle
def test_a_call_opens_the_real_context():
    with real.imported() as package:
        manager = package.quantization.FP8GlobalStateManager
        seen = []

        def forward(x, **_):
            seen.append((manager.is_fp8_enabled(), manager.get_fp8_recipe()))
            return x

        layer = linear(16, 16, parallel_mode="column")
        supported = dict.fromkeys(("is_fp8_available",), (True, ""))
        with (
            mock.patch.object(layer.engine.module(), "forward", forward),
            mock.patch.object(package.quantization, "check_recipe_support"),
            mock.patch.multiple(manager, **{n: lambda v=v: v for n, v in supported.items()}),
        ):
            layer(torch.ones(1, 16))
            layer.recipe = recipe = CurrentScaling()
            layer(torch.ones(1, 16))
            with package.autocast(recipe=to_transformer_engine(recipe)):
                layer.recipe = None
                layer(torch.ones(1, 16))
        assert [enabled for enabled, _ in seen] == [False, True, False]
        assert seen[1][1] == to_transformer_engine(recipe)


@real.needs_oracle
def test_one_module_of_an_outer_context_is_the_first():
    recipe = DelayedScaling(amax_history_len=2)
    with real.imported() as package:
        manager = package.quantization.FP8GlobalStateManager
        seen = []

        def forward(x, **_):
            seen.append(manager.is_first_fp8_module())
            return x

        supported = {"is_fp8_available": lambda: (True, "")}
        layers = [linear(16, 16, parallel_mode="column") for _ in range(3)]
        with (
            mock.patch.object(package.quantization, "check_recipe_support"),
            mock.patch.object(package.module.base.TransformerEngineBaseModule, "init_fp8_metadata"),
            mock.patch.object(Scales, "share_with"),
            mock.patch.multiple(manager, **supported),
        ):
            for layer in layers:
                layer.recipe = recipe
                layer.engine.module().forward = forward
            for _ in range(2):
                with torch.no_grad(), package.autocast(recipe=to_transformer_engine(recipe)):
                    for layer in layers:
                        layer(torch.ones(1, 16))
        assert seen == [True, False, False] * 2
