"""Recipes of low precision as data: which numbers, which blocks, which scales.

A recipe says how a linear layer rounds the three operands of its three products: the input and
the weight of the forward product, and the gradient of the output in both products of backward.
It knows neither a model nor a back end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megablocks_core.parallel.checks import (
    check_choice,
    check_flags,
    check_number,
    check_whole,
)

FORMATS = ("e4m3", "hybrid")
BACKWARD = ("quantized", "high_precision", "dequantized")
OPERANDS = ("input", "weight", "gradient")

Format = Literal["e4m3", "hybrid"]
Backward = Literal["quantized", "high_precision", "dequantized"]


@dataclass(frozen=True)
class DelayedScaling:
    """FP8 with one scale for a tensor, made from the largest values of steps before.

    The scale of a tensor that meets its values now is not theirs: it is
    ``largest number of the format / (amax * 2**margin)`` with an amax of the history. So there is
    state, which a checkpoint must hold.

    Attributes:
        format: "e4m3" for all tensors, or "hybrid": gradients in E5M2.
        margin: Powers of two left free above the largest value.
        amax_history_len: How many steps the history holds.
        amax_algorithm: "max" of the history, or its "most_recent" entry.
        reduce_amax: Over the module's ``amax_group``, so that scales are those of one process.
    """

    format: Format = "hybrid"
    margin: int = 0
    amax_history_len: int = 1024
    amax_algorithm: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: One is of another kind.
        """
        check_choice("format", self.format, FORMATS)
        check_whole("margin", self.margin, least=0, most=64)
        check_whole("amax_history_len", self.amax_history_len, least=1)
        check_choice("amax_algorithm", self.amax_algorithm, ("max", "most_recent"))
        check_flags(reduce_amax=self.reduce_amax)


@dataclass(frozen=True)
class CurrentScaling:
    """FP8 with one scale for a tensor, made from its own largest value.

    Attributes:
        format: "e4m3" for all tensors, or "hybrid": gradients in E5M2.
        power_of_two_scales: Scales are rounded down to powers of two.
        amax_epsilon: The least value that counts as the largest of a tensor.
        backward: In backward, "quantized" operands; those of "high_precision" that forward was
            given; or the ones that forward rounded, "dequantized", with an unrounded gradient.
    """

    format: Format = "hybrid"
    power_of_two_scales: bool = False
    amax_epsilon: float = 0.0
    backward: Backward = "quantized"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: One is of another kind.
        """
        check_choice("format", self.format, FORMATS)
        check_flags(power_of_two_scales=self.power_of_two_scales)
        _check_epsilon(self.amax_epsilon)
        check_choice("backward", self.backward, BACKWARD)


@dataclass(frozen=True)
class BlockScaling:
    """FP8 with one scale for 128 values in a row, or for a square of 128 x 128.

    A row of values runs along the dimension that a product sums over, so one tensor is rounded
    twice where two products read it: along its rows and along its columns. Squares serve both.

    Attributes:
        format: "e4m3" for all tensors, or "hybrid": gradients in E5M2.
        squares: The one operand with blocks of 128 x 128: "weight", "input", "gradient" or
            "none" of them; the others have blocks of 1 x 128.
        power_of_two_scales: Scales are rounded down to powers of two.
        amax_epsilon: The least value that counts as the largest of a block.
        backward: In backward, "quantized" operands; those of "high_precision" that forward was
            given; or the ones that forward rounded, "dequantized", with an unrounded gradient.
    """

    format: Format = "e4m3"
    squares: Literal["weight", "input", "gradient", "none"] = "weight"
    power_of_two_scales: bool = True
    amax_epsilon: float = 0.0
    backward: Backward = "quantized"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: One is of another kind.
        """
        check_choice("format", self.format, FORMATS)
        check_choice("squares", self.squares, (*OPERANDS, "none"))
        check_flags(power_of_two_scales=self.power_of_two_scales)
        _check_epsilon(self.amax_epsilon)
        check_choice("backward", self.backward, BACKWARD)


@dataclass(frozen=True)
class MXFP8:
    """FP8 with one power of two (E8M0) for 32 values in a row, as the OCP MX formats have.

    Attributes:
        format: "e4m3" for all tensors, or "hybrid": gradients in E5M2.
        square_weights: Weights have blocks of 32 x 32, which serve both products that read them.
        backward: In backward, "quantized" operands; those of "high_precision" that forward was
            given; or the ones that forward rounded, "dequantized", with an unrounded gradient.
    """

    format: Format = "e4m3"
    square_weights: bool = False
    backward: Backward = "quantized"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: One is of another kind.
        """
        check_choice("format", self.format, FORMATS)
        check_flags(square_weights=self.square_weights)
        check_choice("backward", self.backward, BACKWARD)


@dataclass(frozen=True)
class NVFP4:
    """FP4 (E2M1) with two levels of scales: E4M3 for 16 values in a row, float32 for the tensor.

    Attributes:
        hadamard: Inputs and gradients are turned by a 16 x 16 Hadamard matrix with signs where
            they meet in the product for the gradient of the weight.
        stochastic_rounding: Gradients are rounded up or down by chance, so that sums of many are
            right on average.
        square_weights: Weights have blocks of 16 x 16, which serve both products that read them.
        backward: In backward, "quantized" operands; those of "high_precision" that forward was
            given; or the ones that forward rounded, "dequantized", with an unrounded gradient.
    """

    hadamard: bool = True
    stochastic_rounding: bool = True
    square_weights: bool = True
    backward: Backward = "quantized"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: One is of another kind.
        """
        check_flags(
            hadamard=self.hadamard,
            stochastic_rounding=self.stochastic_rounding,
            square_weights=self.square_weights,
        )
        check_choice("backward", self.backward, BACKWARD)


Recipe = DelayedScaling | CurrentScaling | BlockScaling | MXFP8 | NVFP4
RECIPES = (DelayedScaling, CurrentScaling, BlockScaling, MXFP8, NVFP4)


def check_recipe(name: str, recipe: object) -> None:
    """Raise unless it is a recipe."""
    if not isinstance(recipe, RECIPES):
        kinds = ", ".join(kind.__name__ for kind in RECIPES)
        raise ValueError(f"{name}={recipe!r} must be a recipe: one of {kinds}")


def _check_epsilon(value: object) -> None:
    check_number("amax_epsilon", value, "a number of at least 0", lambda x: 0 <= x < float("inf"))
