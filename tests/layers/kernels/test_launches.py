"""What is launched compiles for each architecture with what it is launched with."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megablocks_core.layers.kernels import launches
from megablocks_core.layers.kernels.plain import Plain
from megablocks_core.layers.kernels.product_kernels import product_kernel, weight_gradient_kernel
from megablocks_core.layers.kernels.row_kernels import (
    row_products_kernel,
    take_kernel,
    total_kernel,
)
from megablocks_core.layers.kernels.spans import spans_of
from tests.layers.kernels.compiling import ARCHITECTURES

OTHER_DTYPES = [torch.float16, torch.float32]
CONSTANTS = {
    take_kernel: ["WEIGHTED", "ROWS", "FEATURES"],
    total_kernel: ["WEIGHTED", "ROWS", "FEATURES"],
    row_products_kernel: ["ROWS", "FEATURES"],
    product_kernel: ["GATHERED", "WIDENED", "ROWS", "OUTPUTS", "INPUTS"],
    weight_gradient_kernel: ["GATHERED", "ADDED", "WIDENED", "ROWS", "OUTPUTS", "INPUTS"],
}


def every_launch(kernels, dtype):
    """Each method as a layer calls it; with sizes that are multiples of 16, as in models."""
    rows, places = torch.zeros(256, dtype=torch.int64), torch.zeros(64, 4, dtype=torch.int64)
    x, y, dy = (torch.zeros(n, h, dtype=dtype) for n, h in ((64, 512), (256, 512), (256, 192)))
    weight, weights = torch.zeros(8, 192, 512, dtype=dtype), torch.zeros(256)
    spans = spans_of(torch.full((8,), 32), 256)
    kernels.take(x, rows)
    kernels.take(x, rows, weights)
    kernels.total(y, places)
    kernels.total(y, places, weights)
    kernels.total(y, places[:, :1])
    kernels.row_products(x, rows, y)
    kernels.product(x, rows, weight, spans)
    kernels.product(y, None, weight, spans)
    kernels.input_gradient(dy, weight, spans)
    kernels.weight_gradient(dy, x, rows, spans)
    kernels.weight_gradient(dy, y, None, spans, into=torch.zeros_like(weight))


@pytest.fixture
def launched(monkeypatch):
    """What is launched from now on, which does not run."""
    seen = []

    def note(kernel, grid, *arguments, **named):
        seen.append((kernel, grid, arguments, named))

    monkeypatch.setattr(launches, "launch", note)
    return seen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_DTYPES)],
)
def test_every_launch_compiles_for_each_architecture(launched, compile_for, architecture, dtype):
    shared, instruction = ARCHITECTURES[architecture]
    every_launch(launches.Launches(), dtype)
    assert {kernel for kernel, *_ in launched} == set(CONSTANTS)
    for kernel, grid, arguments, named in launched:
        compiled = compile_for(architecture, kernel, grid, arguments, named)
        ptx = compiled.asm["ptx"]
        assert compiled.asm["cubin"]
        assert f".target sm_{architecture}" in ptx
        assert compiled.metadata.shared <= shared
        assert not re.search(r"\b(atom|red)\.", ptx)
        is_product = kernel in (product_kernel, weight_gradient_kernel)
        assert (instruction in ptx) == (is_product and dtype != torch.float32)
        assert is_product or "fma.rn.f32" not in ptx, "the twins round each product"


def test_signatures(launched):
    every_launch(launches.Launches(), torch.float16)
    for kernel, grid, arguments, named in launched:
        constants = [each.name for each in kernel.params if each.is_constexpr]
        assert constants == CONSTANTS[kernel]
        assert set(constants) <= named.keys()
        assert len(arguments) + len(constants) == len(kernel.params)
        assert all(each > 0 for each in grid) and max(grid[1:], default=1) < 2**16


def test_nothing_is_read_on_the_host(launched):
    with FakeTensorMode():
        every_launch(launches.Launches(), torch.bfloat16)
    assert len(launched) == 11


def test_twins_and_launches_have_the_same_methods():
    def methods(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert methods(launches.Launches) == methods(Plain)
