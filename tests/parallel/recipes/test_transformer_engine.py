"""Every field of a recipe reaches Transformer Engine, and contexts are its own.

The published package is compared under the oracle transformer-engine.
"""

import sys

import pytest

from megablocks_core.parallel.recipes import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipes,
    autocast,
    initialise,
    to_transformer_engine,
)
from megablocks_core.parallel.recipes.recipe import RECIPES
from tests.parallel.transformer_engine import real
from tests.parallel.transformer_engine.fake import installed
from tests.parallel.transformer_engine.fake_quantization import FP8GlobalStateManager

ENVIRONMENT = (
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "NVTE_NVFP4_DISABLE_RHT",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
)
QUANTIZERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


@pytest.fixture(autouse=True)
def transformer_engine():
    with installed():
        yield


@pytest.fixture(params=["fake", pytest.param("real", marks=real.needs_oracle)])
def either(request, transformer_engine, monkeypatch):
    """The fake, and the real package whose environment says otherwise."""
    if request.param == "fake":
        yield
        return
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    with real.imported():
        yield


def told(theirs, *names):
    return tuple(getattr(theirs, name) for name in names)


def test_delayed_scaling(either):
    recipe = DelayedScaling("e4m3", 2, 16, "most_recent", False)
    theirs = to_transformer_engine(recipe)
    assert type(theirs).__name__ == "DelayedScaling"
    names = ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax", "fp8_dpa")
    assert told(theirs, *names) == (2, 16, "most_recent", False, False)
    assert theirs.fp8_format.name == "E4M3"
    assert to_transformer_engine(DelayedScaling()).fp8_format.name == "HYBRID"


def test_current_scaling(either):
    theirs = to_transformer_engine(CurrentScaling("e4m3", True, 1e-3, "high_precision"))
    assert type(theirs).__name__ == "Float8CurrentScaling"
    names = ("use_power_2_scales", "backward_override")
    assert told(theirs, *names) == (True, "high_precision")
    for params in told(theirs, *QUANTIZERS):
        assert (params.power_2_scale, params.amax_epsilon) == (True, 1e-3)
    plain = to_transformer_engine(CurrentScaling())
    assert {params.power_2_scale for params in told(plain, *QUANTIZERS)} == {False}
    assert (plain.fp8_format.name, plain.backward_override) == ("HYBRID", None)


@pytest.mark.parametrize(
    ("squares", "dims"),
    [("input", (2, 1, 1)), ("weight", (1, 2, 1)), ("gradient", (1, 1, 2)), ("none", (1, 1, 1))],
)
def test_block_scaling(either, squares, dims):
    theirs = to_transformer_engine(BlockScaling("hybrid", squares, False, 0.5, "dequantized"))
    assert type(theirs).__name__ == "Float8BlockScaling"
    names = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
    assert told(theirs, *names) == dims
    assert told(theirs, "use_f32_scales", "backward_override") == (True, "dequantized")
    assert theirs.fp8_format.name == "HYBRID"
    for params in told(theirs, *QUANTIZERS):
        assert (params.power_2_scale, params.amax_epsilon) == (False, 0.5)
    plain = to_transformer_engine(BlockScaling())
    assert {params.power_2_scale for params in told(plain, *QUANTIZERS)} == {True}


def test_mxfp8(either):
    theirs = to_transformer_engine(MXFP8("hybrid", True, "dequantized"))
    assert type(theirs).__name__ == "MXFP8BlockScaling"
    assert told(theirs, "enable_2d_quantization", "backward_override") == (True, "dequantized")
    assert theirs.fp8_format.name == "HYBRID"


@pytest.mark.parametrize("on", [True, False])
def test_nvfp4(either, on):
    theirs = to_transformer_engine(NVFP4(on, not on, on, "high_precision"))
    assert type(theirs).__name__ == "NVFP4BlockScaling"
    names = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
    assert told(theirs, *names) == (not on, on, not on)
    assert told(theirs, "nvfp4_4over6", "row_scaled_activation") == ("none", False)
    assert theirs.backward_override == "high_precision"


@pytest.mark.parametrize("kind", RECIPES)
def test_equal_recipes_share_one_object(either, kind):
    assert to_transformer_engine(kind()) is to_transformer_engine(kind())
    with pytest.raises(ValueError, match="recipe=None must be a recipe"):
        to_transformer_engine(None)


def test_the_outer_context_is_open_around_a_pass_and_closed_after_it():
    state = FP8GlobalStateManager.quantization_state
    with autocast(Recipes({"a": MXFP8(), "b": None})):
        assert state.autocast_depth == 1 and state.fp8_enabled
        assert state.fp8_recipe is to_transformer_engine(MXFP8())
    assert state.autocast_depth == 0 and not state.fp8_enabled
    with autocast([]):
        assert state.autocast_depth == 0


def test_delayed_recipes_that_would_be_taken_for_each_other_are_refused():
    pair = [DelayedScaling(), DelayedScaling(amax_algorithm="most_recent")]
    with pytest.raises(ValueError, match="must differ in more than amax_algorithm"):
        autocast(pair)
    with autocast([DelayedScaling(), DelayedScaling(margin=1), DelayedScaling()]):
        pass


def test_weights_are_initialised_in_the_recipes_numbers():
    state = FP8GlobalStateManager.quantization_state
    with initialise(MXFP8(), preserve_high_precision_values=True):
        assert state.fp8_parameters and state.high_precision_init_val
        assert state.fp8_recipe is to_transformer_engine(MXFP8())
    assert not state.fp8_parameters
    with pytest.raises(ValueError, match="preserve_high_precision_values=1"):
        initialise(MXFP8(), preserve_high_precision_values=1)


def test_a_missing_package_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.setitem(sys.modules, name, None)
    for call in (to_transformer_engine, initialise):
        with pytest.raises(ImportError, match="pip install 'megablocks-core\\[te\\]'"):
            call(MXFP8())
