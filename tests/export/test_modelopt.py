"""ModelOpt's numbers and scales are read as the plain tensors that they stand for."""

import re

import pytest
import torch

from megablocks_core.export.lazies import lazy
from megablocks_core.export.modelopt import modelopt
from megablocks_core.files.safetensors import DTYPE_CODES

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BYTES = torch.arange(256, dtype=torch.uint8)


def read(algorithm, tensors, shape="flat"):
    lazies = {name: lazy(tensor, DTYPE_CODES[tensor.dtype]) for name, tensor in tensors.items()}
    settings = {"quant_algo": algorithm}
    faults = []
    found = modelopt(lazies, settings if shape == "flat" else {"quantization": settings}, faults)
    return found, faults


def same(found, expected):
    """All of it, and boxes that begin and end inside groups and bytes."""
    assert tuple(found.get_shape()) == tuple(expected.shape) and found.get_dtype() == "BF16"
    rows, columns = expected.shape
    for box in (
        (slice(0, rows), slice(0, columns)),
        (slice(1, rows), slice(5, columns - 3)),
        (slice(0, 1), slice(columns - 1, columns)),
        (slice(rows - 1, rows), slice(0, 17)),
        (slice(2, 2), slice(0, columns)),
    ):
        assert torch.equal(found[box], expected[box]), box


def eight():
    is_number = BYTES.view(torch.float8_e4m3fn).float().isfinite()
    return torch.where(is_number, BYTES, 1).view(torch.float8_e4m3fn).view(8, 32)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("words", ["flat", "older"])
def test_fp8(shape, words):
    scale = torch.tensor(0.3).view(shape)
    beside = {"a.input_scale": torch.tensor(1.0), "a.k_scale": torch.tensor(1.0)}
    tensors = {"a.weight": eight(), "a.weight_scale": scale, "b.weight": torch.ones(2), **beside}
    found, faults = read("FP8", tensors, words)
    assert not faults and list(found) == ["a.weight", "b.weight"]
    same(found["a.weight"], (eight().float() * 0.3).bfloat16())
    assert found["b.weight"].get_dtype() == "F32"


def test_nvfp4():
    scales = torch.rand(8, 4).to(torch.float8_e4m3fn)
    second = torch.tensor(0.7)
    tensors = {
        "a.weight": BYTES.view(8, 32),
        "a.weight_scale": scales,
        "a.weight_scale_2": second,
        "a.input_scale": torch.tensor(1.0),
    }
    found, faults = read("NVFP4", tensors)
    codes = torch.stack([BYTES % 16, BYTES // 16], 1).flatten().long()
    numbers = (E2M1[codes % 8] * torch.where(codes < 8, 1, -1)).view(8, 64)
    assert not faults and list(found) == ["a.weight"]
    factors = (scales.float() * second).repeat_interleave(16, 1)
    same(found["a.weight"], (numbers * factors).bfloat16())


def test_int8():
    numbers, scales = BYTES.view(torch.int8).view(8, 32), torch.rand(8)
    found, faults = read("W8A16", {"a.weight": numbers, "a.weight_scale": scales})
    assert not faults
    same(found["a.weight"], (numbers.float() * scales.unsqueeze(1)).bfloat16())


@pytest.mark.parametrize("before", [False, True])
def test_int4(before):
    scales, factors = torch.rand(16, 4), torch.rand(32)
    tensors = {"a.weight": BYTES.view(8, 32), "a.weight_scale": scales}
    if before:
        tensors["a.pre_quant_scale"] = factors
    found, faults = read("W4A16_AWQ", tensors)
    low, high = BYTES.view(8, 32).int() % 16, BYTES.view(8, 32).int() // 16
    codes = torch.stack([low, high], 1).view(16, 32)
    values = torch.where(codes < 8, codes, codes - 16) * scales.repeat_interleave(8, 1)
    assert not faults and list(found) == ["a.weight"]
    same(found["a.weight"], (values * factors if before else values).bfloat16())


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("FP8", {"a.weight_scale": None}, "a.weight_scale is missing"),
        ("FP8", {"a.weight": None}, "a.weight is missing, but a.weight_scale is there"),
        ("FP8", {"a.weight": torch.ones(8, 32)}, "a.weight is F32 and must be F8_E4M3"),
        ("FP8", {"a.weight_scale": torch.ones(8)}, r"a.weight_scale has shape \(8,\)"),
        ("FP8", {"a.weight_scale": torch.tensor(1)}, "a.weight_scale is I64 and must be F32"),
        ("FP8", {"a.weight": torch.ones(2, 2, 2).to(torch.float8_e4m3fn)}, "must be a matrix"),
        ("FP8", {"b.input_scale": torch.ones(())}, "b.weight is missing, but b.input_scale"),
        ("NVFP4", {"a.weight": BYTES.view(8, 32)}, "a.weight_scale_2 is missing"),
        ("W4A16_AWQ", {"a.pre_quant_scale": torch.ones(3)}, "a.pre_quant_scale has shape"),
    ],
)
def test_what_does_not_fit_is_named(algorithm, changes, message):
    tensors = {"a.weight": eight(), "a.weight_scale": torch.tensor(1.0), **changes}
    _, faults = read(algorithm, {name: one for name, one in tensors.items() if one is not None})
    assert re.search(message, "; ".join(faults))


@pytest.mark.parametrize("algorithm", ["W4A8_AWQ", None, 3])
def test_other_algorithms_are_named(algorithm):
    with pytest.raises(ValueError, match=f"quant_algo={algorithm!r} must be one of FP8, NVFP4"):
        read(algorithm, {})
