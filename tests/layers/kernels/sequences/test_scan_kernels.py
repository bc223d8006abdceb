"""Kernels of the scan forward compile for each architecture with what they are launched with."""

import torch

from megablocks_core.layers.kernels.sequences import scan as launches
from megablocks_core.layers.kernels.sequences import scan_kernels
from tests.layers.kernels.sequences.compiled import (
    EVERY_ARCHITECTURE,
    EVERY_DTYPE,
    assert_compiles,
    noted,
)

PRODUCTS = {scan_kernels.states_kernel, scan_kernels.products_kernel, scan_kernels.mix_kernel}


def tensors(dtype):
    """x, dt, A, B, C, D, entries and documents of a model's sizes."""
    x, B = torch.zeros(1, 512, 16, 64, dtype=dtype), torch.zeros(1, 512, 2, 128, dtype=dtype)
    dt, A = torch.zeros(1, 512, 16), torch.zeros(16)
    document, entries = torch.zeros(512, dtype=torch.int64), torch.zeros(8, 1, 16, 64, 128)
    return x, dt, A, B, B, A, entries, document


@EVERY_DTYPE
@EVERY_ARCHITECTURE
def test_every_launch_compiles(monkeypatch, compile_for, architecture, dtype):
    given = tensors(dtype)
    launched = noted(
        monkeypatch, launches, lambda: launches.scan(*given, carry=None, chunk_size=64)
    )
    assert {kernel for kernel, *_ in launched} == PRODUCTS | {scan_kernels.pass_kernel}
    products = PRODUCTS if dtype != torch.float32 else ()
    assert_compiles(launched, compile_for, architecture, products=products)
