"""Quantised weights and their scales, made of weights box by box.

Rules and layouts are those of ModelOpt 0.47, whose tensors these are bit for bit, and of
DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3) for blocks. All is computed in float32,
but quotients of E4M3 numbers with one scale are rounded to the weight's dtype first, as there.
A scale is what numbers are times to give the weight; where all of a weight are zeros, it is 1.

Dimensions: O outputs, I inputs, R x C a block, G numbers of a group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megablocks_core.export.lazies import Box, Lazy, View, shape_of
from megablocks_core.export.slabs import dtype_of
from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.numbers.formats import E2M1, E4M3, codes_of, packed, rounded
from megablocks_core.numbers.scaling import Block, block_amax, spread

GROUP_OF_NVFP4 = 16
_INT8, _INT4 = 127.0, 7.0
# The least E4M3 number above 0: a group's scale is never less.
_LEAST = 2.0**-9
_LEAST_NORMAL = torch.finfo(torch.float32).smallest_normal
_F8, _F32 = DTYPE_CODES[torch.float8_e4m3fn], DTYPE_CODES[torch.float32]
_U8, _I8 = DTYPE_CODES[torch.uint8], DTYPE_CODES[torch.int8]


def fp8_scale(amax: float) -> float:
    """The scale of E4M3 numbers, the largest of which stands for ``amax``."""
    return _scale(amax, E4M3.largest)


def nvfp4_scale(amax: float) -> float:
    """The scale of the scales of E2M1 numbers."""
    return _scale(amax, E4M3.largest * E2M1.largest)


def _scale(amax: float, largest: float) -> float:
    """``amax / largest`` in float32, or the least normal number, which a device does not lose."""
    scale = torch.tensor(amax, dtype=torch.float32) / largest
    return max(scale.item(), _LEAST_NORMAL) if amax else 1.0


def scalar(value: float) -> Lazy:
    """A single float32."""

    def read(_: Box) -> Tensor:
        return torch.tensor(value, dtype=torch.float32)

    return View((), _F32, read)


def ones(size: int, dtype: torch.dtype) -> Lazy:
    """As many ones."""
    return View((size,), DTYPE_CODES[dtype], lambda box: torch.ones(_length(box[0]), dtype=dtype))


def converted(weight: Lazy, dtype: torch.dtype) -> Lazy:
    """The weight in another dtype."""
    if dtype_of(weight) == dtype:
        return weight
    return View(shape_of(weight), DTYPE_CODES[dtype], lambda box: weight[box].to(dtype))


def fp8_numbers(weight: Lazy, scale: float) -> Lazy:
    """A weight as E4M3 numbers with one scale, in its shape."""

    def read(box: Box) -> Tensor:
        values = weight[box]
        return _fp8((values.float() / scale).to(values.dtype))

    return View(shape_of(weight), _F8, read)


def fp8_block_numbers(weight: Lazy, block: Block) -> Lazy:
    """A weight [O I] as E4M3 numbers whose blocks have a scale each."""

    def read(box: Box) -> Tensor:
        outer = _widened(box, weight, block)
        values = weight[outer].float()
        numbers = _fp8(values / spread(_block_scales(values, block), block, values.shape))
        return numbers[_inside(box, outer)]

    return View(shape_of(weight), _F8, read)


def fp8_block_scales(weight: Lazy, block: Block) -> Lazy:
    """The scales of a weight's blocks, float32 [O/R I/C], rounded up at the edges."""
    return _of_blocks(weight, block, _F32, lambda values: _block_scales(values, block))


def nvfp4_numbers(weight: Lazy, scale: float) -> Lazy:
    """A weight [O I] as E2M1 numbers, uint8 [O I/2]: the first of two in the low half of a byte.

    Args:
        weight: Of whole groups of 16.
        scale: Of its scales (``nvfp4_scale``).
    """
    rows, columns = weight.get_shape()
    block = (1, GROUP_OF_NVFP4)

    def read(box: Box) -> Tensor:
        wanted = (box[0], slice(2 * box[1].start, 2 * box[1].stop))
        outer = _widened(wanted, weight, block)
        values = weight[outer].float()
        factors = _group_scales(values, scale).float() * scale
        # Adding nothing makes a plain zero of a negative one, which has a code of its own.
        scaled = values / spread(factors, block, values.shape) + 0.0
        return packed(codes_of(rounded(scaled, E2M1), E2M1)[_inside(wanted, outer)])

    return View((rows, columns // 2), _U8, read)


def nvfp4_scales(weight: Lazy, scale: float) -> Lazy:
    """The scales of a weight's groups of 16, E4M3 [O I/16], themselves scaled."""
    block = (1, GROUP_OF_NVFP4)
    return _of_blocks(weight, block, _F8, lambda values: _group_scales(values, scale))


def int8_numbers(weight: Lazy) -> Lazy:
    """A weight [O I] as integers of 8 bits whose rows have a scale each."""
    shape = rows, columns = _matrix(weight)

    def read(box: Box) -> Tensor:
        outer = (box[0], slice(0, columns))
        values = weight[outer].float()
        scales = _integer_scales(values, (1, columns), _INT8)
        return (values / scales).round().to(torch.int8)[_inside(box, outer)]

    del rows
    return View(shape, _I8, read)


def int8_scales(weight: Lazy) -> Lazy:
    """The scales of a weight's rows, float32 [O]."""
    rows, columns = _matrix(weight)

    def read(box: Box) -> Tensor:
        values = weight[(box[0], slice(0, columns))].float()
        return _integer_scales(values, (1, columns), _INT8)[:, 0]

    return View((rows,), _F32, read)


def int4_numbers(weight: Lazy, group_size: int) -> Lazy:
    """A weight [O I] as integers of 4 bits, uint8 [O/2 I]: of two rows the first is the low half.

    Args:
        weight: Of an even number of rows, which are whole groups.
        group_size: How many numbers of a row share a scale.
    """
    rows, columns = _matrix(weight)
    block = (1, group_size)

    def read(box: Box) -> Tensor:
        wanted = (slice(2 * box[0].start, 2 * box[0].stop), box[1])
        outer = _widened(wanted, weight, block)
        values = weight[outer].float()
        scales = spread(_integer_scales(values, block, _INT4), block, values.shape)
        numbers = (values / scales).round().to(torch.int8)[_inside(wanted, outer)]
        return packed((numbers & 15).view(torch.uint8).T).T

    return View((rows // 2, columns), _U8, read)


def int4_scales(weight: Lazy, group_size: int) -> Lazy:
    """The scales of a weight's groups, float32 [O I/G]."""
    block = (1, group_size)
    return _of_blocks(weight, block, _F32, lambda values: _integer_scales(values, block, _INT4))


def _fp8(values: Tensor) -> Tensor:
    return values.clamp(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn)


def _block_scales(values: Tensor, block: Block) -> Tensor:
    amax = block_amax(values, block)
    return torch.where(amax == 0, 1.0, (amax / E4M3.largest).clamp(min=_LEAST_NORMAL))


def _group_scales(values: Tensor, scale: float) -> Tensor:
    """The E4M3 scales of groups of 16."""
    # The scale times 6 is rounded to float32 first, as it is where this is a kernel.
    largest = torch.tensor(scale, dtype=torch.float32) * E2M1.largest
    found = block_amax(values, (1, GROUP_OF_NVFP4)) / largest.to(values.device)
    return torch.where(found == 0, 1.0, found).clamp(_LEAST, E4M3.largest).to(torch.float8_e4m3fn)


def _integer_scales(values: Tensor, block: Block, largest: float) -> Tensor:
    amax = block_amax(values, block)
    return torch.where(amax == 0, 1.0, (amax / largest).clamp(min=_LEAST_NORMAL))


def _of_blocks(
    weight: Lazy, block: Block, dtype: str, of_values: Callable[[Tensor], Tensor]
) -> Lazy:
    """What each block of a weight gives."""
    shape = _matrix(weight)

    def read(box: Box) -> Tensor:
        spans = (
            slice(part.start * step, min(part.stop * step, size))
            for part, step, size in zip(box, block, shape, strict=True)
        )
        return of_values(weight[tuple(spans)].float())

    sizes = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    return View(sizes, dtype, read)


def _matrix(weight: Lazy) -> tuple[int, int]:
    rows, columns = weight.get_shape()
    return rows, columns


def _widened(box: Box, weight: Lazy, block: Block) -> Box:
    """The whole blocks that hold a box."""
    return tuple(
        slice(part.start // step * step, min(-(-part.stop // step) * step, size))
        for part, step, size in zip(box, block, weight.get_shape(), strict=True)
    )


def _inside(box: Box, outer: Box) -> Box:
    return tuple(
        slice(part.start - whole.start, part.stop - whole.start)
        for part, whole in zip(box, outer, strict=True)
    )


def _length(part: slice) -> int:
    return part.stop - part.start
