"""Scales of tensors and blocks, and tensors rounded under them.

A tensor of low precision is numbers of a format and factors in wider numbers: its values are the
numbers times the factors of their blocks. What is rounded is a matrix [R C]; blocks of r x c cover
it from its first row and column, and the last ones may be cut off. The rules are those of
Transformer Engine 2.20: one scale for a tensor (https://arxiv.org/abs/2209.05433), float32 scales
of blocks (https://arxiv.org/abs/2412.19437, section 3.3), MX (OCP MX formats, revision 1.0) and
NVFP4 (https://arxiv.org/abs/2509.25149, appendix B).

Dimensions: R rows, C columns, r x c a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megablocks_core.numbers.formats import (
    E2M1,
    E4M3,
    Float,
    power_code_above,
    power_of_code,
    rounded,
    rounded_by_chance,
    wide,
)

Block = tuple[int, int]
_MOST = torch.finfo(torch.float32).max
# Signs of the rows of the Hadamard matrix that turns 16 values; every rank has the same.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class Rounded(NamedTuple):
    """A matrix in low precision.

    Attributes:
        numbers: Of the format, [R C], in at least float32.
        factors: What the numbers of each block are times, [R/r C/c]; of a whole tensor [1 1].
        block: r and c; ``None``: one block.
        factor: What all numbers are times besides, a single float32.
    """

    numbers: Tensor
    factors: Tensor
    block: Block | None = None
    factor: Tensor | None = None

    def values(self) -> Tensor:
        """The matrix that it stands for, in the dtype of ``numbers``."""
        factors = self.factors
        if self.block is not None:
            factors = spread(factors, self.block, self.numbers.shape)
        values = self.numbers * factors
        return values if self.factor is None else values * self.factor


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor, 0 of an empty one: a single float32."""
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude of each block of a matrix [R C], float32 [R/r C/c]."""
    rows, columns = block
    x = pad(x.abs(), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    blocks = x.unflatten(1, (-1, columns)) if x.shape[1] else x.new_zeros(x.shape[0], 0, columns)
    blocks = blocks.amax(2)
    if not blocks.shape[0]:
        return blocks.float()
    return blocks.unflatten(0, (-1, rows)).amax(1).float()


def spread(scales: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """The scale of its block at each place of a matrix of ``shape``."""
    whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole[: shape[0], : shape[1]]


def current_scale(
    amax: Tensor, to: Float, *, power_of_two: bool = False, epsilon: float = 0.0
) -> Tensor:
    """What to multiply values by, so that the largest of them fits the format.

    1 where ``amax`` is 0 or not finite; else at most the largest float32.
    """
    amax = amax.clamp(min=epsilon)
    scale = _quotient(to.largest, amax)
    if power_of_two:
        scale = _power_below(scale)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, 1.0)


def delayed_scale(amax: Tensor, before: Tensor, to: Float, *, margin: int = 0) -> Tensor:
    """The next scale of delayed scaling; that of before where ``amax`` is 0 or not finite."""
    scale = _quotient(to.largest, amax, margin)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, before)


def round_tensor(x: Tensor, to: Float, scale: Tensor) -> Rounded:
    """A tensor with one scale."""
    return Rounded(rounded(wide(x) * scale, to), scale.reciprocal().reshape(1, 1))


def round_blocks(
    x: Tensor, to: Float, block: Block, *, power_of_two: bool = True, epsilon: float = 0.0
) -> Rounded:
    """A matrix whose blocks have a float32 scale each."""
    amax = block_amax(x, block)
    scale = current_scale(amax, to, power_of_two=power_of_two, epsilon=epsilon)
    numbers = rounded(wide(x) * spread(scale, block, x.shape), to)
    return Rounded(numbers, scale.reciprocal(), block)


def round_mx(x: Tensor, to: Float, block: Block = (1, 32)) -> Rounded:
    """A matrix whose blocks have a power of two each, as E8M0 has it (``power_code_above``)."""
    codes = power_code_above(block_amax(x, block) * (1.0 / to.largest))
    factors = power_of_code(codes)
    # A block that is nothing beside the least power is not enlarged.
    scale = torch.where(codes == 0, 1.0, factors.reciprocal())
    return Rounded(rounded(wide(x) * spread(scale, block, x.shape), to), factors, block)


def round_nvfp4(
    x: Tensor, block: Block = (1, 16), *, amax: Tensor | None = None, chance: Tensor | None = None
) -> Rounded:
    """A matrix in E2M1, its blocks scaled by E4M3 numbers and those by one float32.

    The float32 makes the scale of the block with the largest value of the tensor the largest
    E4M3 number.

    Args:
        x: The matrix.
        block: 1 x 16, or 16 x 16.
        amax: The largest magnitude of the whole tensor, if ``x`` is a share of it.
        chance: Uniform values in [0, 1) [R C]: rounding goes by chance.
    """
    amax = amax_of(x) if amax is None else amax
    encode = _quotient(E4M3.largest * E2M1.largest, amax)
    encode = torch.where((amax > 0) & (encode > 0), encode, 1.0)
    decode = encode.reciprocal()
    factors = rounded(block_amax(x, block) * (encode * (1.0 / E2M1.largest)), E4M3)
    scale = (factors * decode).reciprocal().clamp(max=_MOST)
    scaled = wide(x) * spread(scale, block, x.shape)
    numbers = rounded(scaled, E2M1) if chance is None else rounded_by_chance(scaled, E2M1, chance)
    return Rounded(numbers, factors, block, decode)


def turned(x: Tensor) -> Tensor:
    """Each 16 rows of a matrix [R C] multiplied by a 16 x 16 Hadamard matrix with signs.

    Rows of zeros make the last 16 whole. The product of two matrices over rows that are both
    turned is what it was: the turn is orthogonal.
    """
    x = pad(x, (0, 0, 0, -x.shape[0] % 16))
    if not x.shape[0]:
        return x
    turn = _hadamard(x.device).to(x.dtype)
    return torch.einsum("bic,ij->bjc", x.unflatten(0, (-1, 16)), turn).flatten(0, 1)


def _quotient(number: float, of: Tensor, margin: int = 0) -> Tensor:
    """``number / of / 2**margin`` in float32, rounded once; at most the largest float32.

    A number divided by a tensor is for torch a product with reciprocals, which rounds twice.
    """
    return (torch.full_like(of, number) / of / 2.0**margin).clamp(max=_MOST)


def _hadamard(device: torch.device) -> Tensor:
    """Sylvester's matrix of 16, orthogonal, its rows with signs."""
    matrix = torch.ones(1, 1, device=device)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.tensor(_SIGNS, device=device).unsqueeze(1) * matrix / 4


def _power_below(scale: Tensor) -> Tensor:
    """The largest power of two that is not above it: its mantissa's bits cut off."""
    return (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
