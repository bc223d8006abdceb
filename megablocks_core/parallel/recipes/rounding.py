"""How a recipe rounds one operand of a linear layer's products.

Dimensions: R rows, C columns of an operand as a matrix: tokens and features of an input or a
gradient, output and input features of a weight.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megablocks_core.numbers.formats import E4M3, E5M2, Float
from megablocks_core.numbers.scaling import (
    Block,
    amax_of,
    current_scale,
    round_blocks,
    round_mx,
    round_nvfp4,
    round_tensor,
    turned,
)
from megablocks_core.parallel.counter import bits_of, shift
from megablocks_core.parallel.recipes.recipe import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
)

Operand = Literal["input", "weight", "gradient"]


class Columns(NamedTuple):
    """Which columns of the whole operand are here: chances go by their numbers.

    Attributes:
        numbers: Of each column here [c].
        count: Columns of the whole.
    """

    numbers: Tensor
    count: int


class Chances(NamedTuple):
    """Uniform values for stochastic rounding, a function of three integers and the place.

    Attributes:
        key: Of the layer.
        draw: Which time it is.
        columns: Whose chances are wanted; default all columns from the first.
    """

    key: Tensor
    draw: Tensor
    columns: Columns | None = None

    def of(self, x: Tensor, *, stream: int) -> Tensor:
        """In [0, 1), float32, a value for each place of a matrix [R C]."""
        columns = self.columns
        if columns is None:
            columns = Columns(torch.arange(x.shape[1], device=x.device), x.shape[1])
        rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        key = bits_of(bits_of(self.key, self.draw), stream)
        bits = bits_of(key, rows * columns.count + columns.numbers)
        return shift(bits, 40).float() / (1 << 24)


class Rounding(NamedTuple):
    """How one operand is rounded.

    Attributes:
        recipe: The rules.
        operand: Which of the three it is.
        scales: Of a whole tensor: delayed scaling's scale, current scaling's amax, NVFP4's amaxes
            of the tensor and of its turn; not used by blocks.
        chances: For gradients under stochastic rounding.
    """

    recipe: Recipe
    operand: Operand
    scales: Tensor | None = None
    chances: Chances | None = None

    @property
    def to(self) -> Float:
        """The numbers, where they have 8 bits."""
        hybrid = getattr(self.recipe, "format", "e4m3") == "hybrid"
        return E5M2 if hybrid and self.operand == "gradient" else E4M3

    def over_columns(self, x: Tensor) -> Tensor:
        """The values of ``x`` [R C] for a product that sums over its columns."""
        return self._rounded(x, by_rows=True)

    def over_rows(self, x: Tensor) -> Tensor:
        """The values of ``x`` [R C] for a product that sums over its rows.

        NVFP4 turns inputs and gradients here, and makes R a multiple of 16.
        """
        if turns(self.recipe, self.operand):
            x = turned(x)
        return self._rounded(x, by_rows=False)

    def scale(self) -> Tensor:
        """The scale of a whole tensor, under delayed or current scaling."""
        assert self.scales is not None
        if not isinstance(self.recipe, CurrentScaling):
            return self.scales[0]
        return current_scale(
            self.scales[0],
            self.to,
            power_of_two=self.recipe.power_of_two_scales,
            epsilon=self.recipe.amax_epsilon,
        )

    def _rounded(self, x: Tensor, *, by_rows: bool) -> Tensor:
        recipe = self.recipe
        match recipe:
            case DelayedScaling() | CurrentScaling():
                return round_tensor(x, self.to, self.scale()).values()
            case BlockScaling():
                return round_blocks(
                    x,
                    self.to,
                    self._block(128, by_rows, square=recipe.squares == self.operand),
                    power_of_two=recipe.power_of_two_scales,
                    epsilon=recipe.amax_epsilon,
                ).values()
            case MXFP8():
                block = self._block(32, by_rows, square=self._square_weight(recipe))
                return round_mx(x, self.to, block).values()
            case NVFP4():
                block = self._block(16, by_rows, square=self._square_weight(recipe))
                assert self.scales is not None
                amax = self.scales[int(not by_rows and turns(recipe, self.operand))]
                chance = None if self.chances is None else self.chances.of(x, stream=int(by_rows))
                return round_nvfp4(x, block, amax=amax, chance=chance).values()

    def _square_weight(self, recipe: MXFP8 | NVFP4) -> bool:
        return recipe.square_weights and self.operand == "weight"

    def _block(self, length: int, by_rows: bool, *, square: bool) -> Block:
        """A square, or a line of values along the dimension that is summed over."""
        if square:
            return length, length
        return (1, length) if by_rows else (length, 1)


def turns(recipe: Recipe, operand: Operand) -> bool:
    """Whether the operand is turned where a product sums over its rows."""
    return isinstance(recipe, NVFP4) and recipe.hadamard and operand != "weight"


def amaxes_of(x: Tensor, recipe: Recipe, operand: Operand) -> list[Tensor]:
    """The amaxes that ``Rounding.scales`` of an operand are made from; none of blocks."""
    if isinstance(recipe, BlockScaling | MXFP8):
        return []
    return [amax_of(x), amax_of(turned(x))] if turns(recipe, operand) else [amax_of(x)]


def block_length(recipe: Recipe) -> int:
    """How many values have a scale along a dimension that is summed over; 1: no blocks."""
    return {BlockScaling: 128, MXFP8: 32, NVFP4: 16}.get(type(recipe), 1)
