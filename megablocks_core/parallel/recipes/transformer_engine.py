"""Recipes as Transformer Engine takes them, and the contexts it computes and builds in.

Everything a recipe says is passed by name: their defaults follow the environment. Transformer
Engine is imported when a function here is called, never before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megablocks_core.parallel.checks import check_flags
from megablocks_core.parallel.optional import imported
from megablocks_core.parallel.recipes.recipe import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    check_recipe,
)

_PACKAGE = "transformer_engine"
_OVERRIDES = {"quantized": None, "high_precision": "high_precision", "dequantized": "dequantized"}


def to_transformer_engine(recipe: Recipe) -> Any:
    """Transformer Engine's object for a recipe; equal recipes share one, which must not change.

    Raises:
        ValueError: It is no recipe.
        ImportError: Transformer Engine is not installed.
    """
    check_recipe("recipe", recipe)
    formats = imported(f"{_PACKAGE}.common.recipe", "Format", extra="te")
    return _made(recipe, formats)


def initialise(
    recipe: Recipe, *, preserve_high_precision_values: bool = False
) -> AbstractContextManager[None]:
    """Modules of Transformer Engine built inside hold their weights in the recipe's numbers only.

    Args:
        recipe: What the weights are rounded by.
        preserve_high_precision_values: Keep the values before rounding on the host, for an
            optimizer's masters: ``weight.get_high_precision_init_val()``.

    Raises:
        ValueError: It is no recipe.
        ImportError: Transformer Engine is not installed.
    """
    check_flags(preserve_high_precision_values=preserve_high_precision_values)
    theirs = to_transformer_engine(recipe)
    context = imported(f"{_PACKAGE}.pytorch", "quantized_model_init", extra="te")
    return context(
        enabled=True,
        recipe=theirs,
        preserve_high_precision_init_val=preserve_high_precision_values,
    )


def outer_autocast(recipes: Iterable[Recipe]) -> AbstractContextManager[Any]:
    """Around a whole forward pass: Transformer Engine reduces amaxes once, when it ends.

    Where Transformer Engine is not loaded, or there are no recipes, this does nothing.

    Raises:
        ValueError: Two delayed recipes differ in ``amax_algorithm`` alone, which Transformer
            Engine would not tell apart.
    """
    known = list(dict.fromkeys(recipes))
    if not known or _PACKAGE not in sys.modules:
        return nullcontext()
    delayed = [recipe for recipe in known if isinstance(recipe, DelayedScaling)]
    if len({replace(recipe, amax_algorithm="max") for recipe in delayed}) < len(delayed):
        raise ValueError(f"recipes={delayed} must differ in more than amax_algorithm")
    context = imported(f"{_PACKAGE}.pytorch", "autocast", extra="te")
    return context(enabled=True, recipe=to_transformer_engine(known[0]))


@lru_cache(maxsize=64)
def _made(recipe: Recipe, formats: Any) -> Any:
    names = {DelayedScaling: _delayed, CurrentScaling: _current, BlockScaling: _blocks}
    make = {**names, MXFP8: _mxfp8, NVFP4: _nvfp4}[type(recipe)]
    return make(recipe, formats)


def _kind(name: str) -> Any:
    return imported(f"{_PACKAGE}.common.recipe", name, extra="te")


def _format(recipe: Any, formats: Any) -> Any:
    return {"e4m3": formats.E4M3, "hybrid": formats.HYBRID}[recipe.format]


def _delayed(recipe: DelayedScaling, formats: Any) -> Any:
    return _kind("DelayedScaling")(
        margin=recipe.margin,
        fp8_format=_format(recipe, formats),
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_algorithm,
        reduce_amax=recipe.reduce_amax,
        backward_override=None,
    )


def _current(recipe: CurrentScaling, formats: Any) -> Any:
    theirs = _kind("Float8CurrentScaling")(
        use_power_2_scales=recipe.power_of_two_scales,
        fp8_format=_format(recipe, formats),
        backward_override=_OVERRIDES[recipe.backward],
    )
    return _with_quantizers(theirs, recipe)


def _blocks(recipe: BlockScaling, formats: Any) -> Any:
    dims = {name: 2 if recipe.squares == name else 1 for name in ("input", "weight", "gradient")}
    theirs = _kind("Float8BlockScaling")(
        use_f32_scales=not recipe.power_of_two_scales,
        fp8_format=_format(recipe, formats),
        x_block_scaling_dim=dims["input"],
        w_block_scaling_dim=dims["weight"],
        grad_block_scaling_dim=dims["gradient"],
        backward_override=_OVERRIDES[recipe.backward],
    )
    return _with_quantizers(theirs, recipe)


def _with_quantizers(theirs: Any, recipe: CurrentScaling | BlockScaling) -> Any:
    """Set what their constructor does not take: it was fixed when their module was loaded."""
    params = _kind("QParams")(
        power_2_scale=recipe.power_of_two_scales, amax_epsilon=recipe.amax_epsilon
    )
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(theirs, name, params)
    return theirs


def _mxfp8(recipe: MXFP8, formats: Any) -> Any:
    return _kind("MXFP8BlockScaling")(
        fp8_format=_format(recipe, formats),
        enable_2d_quantization=recipe.square_weights,
        backward_override=_OVERRIDES[recipe.backward],
    )


def _nvfp4(recipe: NVFP4, formats: Any) -> Any:
    return _kind("NVFP4BlockScaling")(
        fp4_format=formats.E2M1,
        fp8_format=formats.E4M3,
        disable_rht=not recipe.hadamard,
        disable_stochastic_rounding=not recipe.stochastic_rounding,
        disable_2d_quantization=not recipe.square_weights,
        row_scaled_activation=False,
        nvfp4_4over6="none",
        backward_override=_OVERRIDES[recipe.backward],
    )
