"""Numbers and scales are those of plain twins, whichever boxes are read."""

import itertools

import pytest
import torch

from megablocks_core.export.lazies import lazy
from megablocks_core.export.quantising import tensors
from megablocks_core.files.safetensors import DTYPE_CODES

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def weight(rows=6, columns=48, dtype=torch.float32):
    """Values of many sizes; a row and a group of zeros, one of them negative; a tiny group."""
    torch.manual_seed(3)
    values = torch.randn(rows, columns) * torch.rand(rows, 1).exp()
    values[1], values[2, 16:32] = 0, 0
    values[1, 3] = -0.0
    values[4, 16:32] *= 1e-6
    return values.to(dtype)


def as_lazy(values):
    return lazy(values, DTYPE_CODES[values.dtype])


def twin_of_fp8(values):
    scale = values.abs().max().float() / 448
    return (values / scale).to(torch.float8_e4m3fn), scale


def twin_of_blocks(values, rows, columns):
    numbers = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    count = (-(-values.shape[0] // rows), -(-values.shape[1] // columns))
    scales = torch.ones(count)
    for row, column in itertools.product(*map(range, count)):
        part = (
            slice(row * rows, (row + 1) * rows),
            slice(column * columns, (column + 1) * columns),
        )
        largest = values[part].float().abs().max()
        if largest > 0:
            scales[row, column] = largest / 448
        numbers[part] = (values[part].float() / scales[row, column]).to(torch.float8_e4m3fn)
    return numbers, scales


def twin_of_nvfp4(values, scale):
    rows, columns = values.shape
    scales = torch.ones(rows, columns // 16, dtype=torch.float8_e4m3fn)
    packed = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    for row, group in itertools.product(range(rows), range(columns // 16)):
        part = values[row, group * 16 : (group + 1) * 16].float()
        one = part.abs().max() / (6 * torch.tensor(scale))
        one = torch.tensor(1.0) if one == 0 else one.clamp(2**-9, 448)
        scales[row, group] = one.to(torch.float8_e4m3fn)
        factor = scales[row, group].float() * scale
        for place, value in enumerate((part / factor).tolist()):
            near = min(range(8), key=lambda code: (abs(E2M1[code] - abs(value)), code % 2))
            code = near + 8 * (value < 0)
            column = group * 16 + place
            packed[row, column // 2] |= code << (4 * (column % 2))
    return packed, scales


def twin_of_integers(values, size, largest):
    rows, columns = values.shape
    numbers = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.ones(rows, columns // size)
    for row, group in itertools.product(range(rows), range(columns // size)):
        part = values[row, group * size : (group + 1) * size].float()
        if part.abs().max() > 0:
            scales[row, group] = part.abs().max() / largest
        numbers[row, group * size : (group + 1) * size] = (part / scales[row, group]).round()
    return numbers, scales


def twin_of_pairs(numbers):
    low, high = numbers[::2] % 16, numbers[1::2] % 16
    return (low + 16 * high).to(torch.uint8)


def same(found, expected):
    """All of it, every single element and some boxes are read alike."""
    assert tuple(found.get_shape()) == tuple(expected.shape)
    assert found.get_dtype() == DTYPE_CODES[expected.dtype]
    boxes = [tuple(slice(0, size) for size in expected.shape)]
    boxes += [
        tuple(slice(low, high) for low, high in zip(lows, highs, strict=True))
        for lows, highs in (
            ([0] * expected.dim(), [1] * expected.dim()),
            ([1] * expected.dim(), [2] * expected.dim()),
            ([size // 3 for size in expected.shape], [size - 1 for size in expected.shape]),
            ([size // 2 for size in expected.shape], list(expected.shape)),
        )
    ]
    for box in boxes:
        values = found[box]
        assert values.dtype == expected.dtype and values.shape == expected[box].shape
        assert torch.equal(as_bits(values), as_bits(expected[box])), box


def as_bits(values):
    return values.contiguous().view(torch.uint8) if values.dtype.itemsize == 1 else values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_with_one_scale(dtype):
    values = weight(dtype=dtype)
    numbers, scale = twin_of_fp8(values)
    assert tensors.fp8_scale(float(values.abs().max())) == scale
    same(tensors.fp8_numbers(as_lazy(values), float(scale)), numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(4, 20), (128, 128), (1, 48), (3, 1)])
def test_fp8_in_blocks(dtype, block):
    values = weight(dtype=dtype)
    numbers, scales = twin_of_blocks(values, *block)
    same(tensors.fp8_block_numbers(as_lazy(values), block), numbers)
    same(tensors.fp8_block_scales(as_lazy(values), block), scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4(dtype):
    values = weight(dtype=dtype)
    scale = tensors.nvfp4_scale(float(values.abs().max()))
    assert scale == float(values.abs().max().float() / 2688)
    numbers, scales = twin_of_nvfp4(values, scale)
    same(tensors.nvfp4_numbers(as_lazy(values), scale), numbers)
    same(tensors.nvfp4_scales(as_lazy(values), scale), scales)


def test_nvfp4_rounds_ties_to_even_numbers_and_negative_zeros_to_plain_ones():
    ties = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.0, -0.1, *[0.0] * 6])
    # A scale of 448 and a second one of 1/448 leave values as they are.
    numbers = tensors.nvfp4_numbers(as_lazy(ties.unsqueeze(0)), 1 / 448)[0:1]
    codes = [code for byte in numbers[0].tolist() for code in (byte & 15, byte >> 4)]
    assert codes[:10] == [7, 0, 2, 2, 4, 4, 6, 6, 0, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers(dtype):
    values = weight(dtype=dtype)
    numbers, scales = twin_of_integers(values, 48, 127)
    same(tensors.int8_numbers(as_lazy(values)), numbers)
    same(tensors.int8_scales(as_lazy(values)), scales[:, 0])
    numbers, scales = twin_of_integers(values, 16, 7)
    same(tensors.int4_numbers(as_lazy(values), 16), twin_of_pairs(numbers))
    same(tensors.int4_scales(as_lazy(values), 16), scales)


def test_zeros_have_the_scale_1_and_nothing_is_too_small_for_a_scale():
    zeros = as_lazy(torch.zeros(2, 32))
    assert tensors.fp8_scale(0.0) == tensors.nvfp4_scale(0.0) == 1
    tiny = torch.finfo(torch.float32).smallest_normal
    assert tensors.fp8_scale(1e-40) == tensors.nvfp4_scale(1e-40) == tiny
    for made in (
        tensors.fp8_numbers(zeros, 1.0),
        tensors.fp8_block_numbers(zeros, (2, 8)),
        tensors.nvfp4_numbers(zeros, 1.0),
        tensors.int8_numbers(zeros),
        tensors.int4_numbers(zeros, 16),
    ):
        assert not made[...].float().any()
    for made in (
        tensors.fp8_block_scales(zeros, (2, 8)),
        tensors.nvfp4_scales(zeros, 1.0),
        tensors.int8_scales(zeros),
        tensors.int4_scales(zeros, 16),
    ):
        assert (made[...].float() == 1).all()
    least = as_lazy(torch.full((2, 32), 1e-42))
    for scales, numbers in (
        (tensors.int8_scales(least), tensors.int8_numbers(least)),
        (tensors.fp8_block_scales(least, (2, 8)), tensors.fp8_block_numbers(least, (2, 8))),
    ):
        assert (scales[...] == tiny).all() and numbers[...].float().isfinite().all()


def test_shapes_are_known_where_no_value_is():
    values = torch.empty(6, 48, device="meta")
    for made in (
        tensors.fp8_numbers(as_lazy(values), 1.0),
        tensors.fp8_block_numbers(as_lazy(values), (4, 20)),
        tensors.fp8_block_scales(as_lazy(values), (4, 20)),
        tensors.nvfp4_numbers(as_lazy(values), 1.0),
        tensors.nvfp4_scales(as_lazy(values), 1.0),
        tensors.int8_numbers(as_lazy(values)),
        tensors.int8_scales(as_lazy(values)),
        tensors.int4_numbers(as_lazy(values), 16),
        tensors.int4_scales(as_lazy(values), 16),
        tensors.converted(as_lazy(values), torch.bfloat16),
    ):
        found = made[...]
        assert found.is_meta and tuple(found.shape) == tuple(made.get_shape())
        assert DTYPE_CODES[found.dtype] == made.get_dtype()


def test_single_values_and_ones():
    assert tensors.scalar(0.1)[...] == torch.tensor(0.1) and tensors.scalar(1).get_shape() == ()
    same(tensors.ones(5, torch.bfloat16), torch.ones(5, dtype=torch.bfloat16))
    values = weight()
    same(tensors.converted(as_lazy(values), torch.bfloat16), values.bfloat16())
