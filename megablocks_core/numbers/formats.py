"""Numbers of 8 and 4 bits: which values they have, how values are rounded to them, their codes.

E4M3, E5M2 and E8M0 as torch's dtypes have them (OCP 8-bit floating point, revision 1.0), E2M1 as
in the OCP MX formats, revision 1.0. Rounded values are ordinary tensors: the arithmetic of low
precision can be followed on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Float(NamedTuple):
    """A format of floating-point numbers.

    Attributes:
        name: Of the format.
        largest: Its largest number.
        mantissa: Bits of the mantissa.
        least_exponent: Of its normal numbers.
    """

    name: str
    largest: float
    mantissa: int
    least_exponent: int


E4M3 = Float("e4m3", 448.0, 3, -6)
E5M2 = Float("e5m2", 57344.0, 2, -14)
E2M1 = Float("e2m1", 6.0, 1, 0)

E8M0_BIAS = 127
_TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def wide(x: Tensor) -> Tensor:
    """``x`` in at least float32, in which scales and rounding are computed."""
    return x if x.dtype.itemsize >= 4 else x.float()


def rounded(x: Tensor, to: Float) -> Tensor:
    """The nearest number of the format, ties to even, in the dtype of ``x``.

    What is larger than the largest number, an infinity too, becomes that; NaN stays.
    """
    return _on_grid(x, to, torch.round)


def rounded_by_chance(x: Tensor, to: Float, chance: Tensor) -> Tensor:
    """The number of the format below or above: up if ``chance``, in [0, 1), falls below the rest.

    Over uniform chances the mean is ``x``, for values within the format's range.
    """

    def below_or_above(steps: Tensor) -> Tensor:
        below = steps.floor()
        return below + (chance < steps - below)

    return _on_grid(x, to, below_or_above)


def _on_grid(x: Tensor, to: Float, choose: Callable[[Tensor], Tensor]) -> Tensor:
    x = x.clamp(-to.largest, to.largest)
    exponent = torch.frexp(x).exponent - 1
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=to.least_exponent) - to.mantissa)
    # Rounding up from the largest binade cannot leave the format, because x was cut first.
    return torch.where(x == 0, x, choose(x / step) * step)


def codes_of(values: Tensor, of: Float) -> Tensor:
    """The bytes that stand for numbers of the format, as ``rounded`` gives them: uint8.

    A code of E2M1 is in the low half of its byte; ``packed`` puts two into one.
    """
    if of is not E2M1:
        return values.to(_TORCH[of]).view(torch.uint8)
    table = torch.tensor(_E2M1_VALUES, dtype=values.dtype, device=values.device)
    magnitude = torch.bucketize(values.abs(), table)
    return (magnitude + 8 * values.signbit()).to(torch.uint8)


def values_of(codes: Tensor, of: Float) -> Tensor:
    """The numbers that codes stand for, as float32."""
    if of is not E2M1:
        return codes.view(_TORCH[of]).float()
    table = torch.tensor(_E2M1_VALUES, device=codes.device)
    magnitude = table[(codes & 7).long()]
    return torch.where(codes >= 8, -magnitude, magnitude)


def packed(codes: Tensor) -> Tensor:
    """Pairs of neighbouring codes of 4 bits in one byte, the first in its low half.

    Raises:
        ValueError: The last dimension is odd.
    """
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes of shape {list(codes.shape)} must have an even last dimension")
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpacked(pairs: Tensor) -> Tensor:
    """The codes of ``packed``."""
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)


def power_code_above(x: Tensor) -> Tensor:
    """E8M0: the code of the least power of two that is not below ``x``, positive float32; uint8.

    Zero has code 0, the least power 2**-127. Beyond 2**127 it stays at 254; NaN has 255.
    """
    mantissa, exponent = torch.frexp(x)
    power = torch.where(mantissa == 0.5, exponent - 1, exponent)
    code = (power + E8M0_BIAS).clamp(0, 254)
    code = torch.where(x == 0, 0, torch.where(torch.isinf(x), 254, code))
    return torch.where(torch.isnan(x), 255, code).to(torch.uint8)


def power_of_code(codes: Tensor) -> Tensor:
    """E8M0: the powers of two that codes stand for, as float32; 255 is NaN."""
    # A power below the least normal float32 is written as its bits: ldexp would lose it.
    code = codes.to(torch.int32)
    bits = torch.where(code == 0, 1 << 22, code << 23)
    return torch.where(code == 255, torch.nan, bits.view(torch.float32))
