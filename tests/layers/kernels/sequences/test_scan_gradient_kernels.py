"""Kernels of the scan backward compile for each architecture with what they are launched with."""

import pytest
import torch

from megablocks_core.layers.kernels.sequences import scan as launches
from megablocks_core.layers.kernels.sequences import scan_gradient_kernels, scan_kernels
from tests.layers.kernels.sequences.compiled import (
    EVERY_ARCHITECTURE,
    EVERY_DTYPE,
    assert_compiles,
    noted,
)
from tests.layers.kernels.sequences.test_scan_kernels import PRODUCTS, tensors

GRADIENT_PRODUCTS = {scan_gradient_kernels.pairs_kernel, scan_gradient_kernels.groups_kernel}
GRADIENTS = GRADIENT_PRODUCTS | {scan_gradient_kernels.pass_back_kernel}


def gradient_launches(monkeypatch, dtype):
    given = tensors(dtype)
    state = torch.zeros(1, 16, 64, 128)
    more = {"carry": state, "dy": given[0], "dfinal": state, "dstates": given[6]}
    return noted(
        monkeypatch,
        launches,
        lambda: launches.scan_gradients(*given, **more, chunk_size=64),
    )


@EVERY_DTYPE
@EVERY_ARCHITECTURE
def test_every_launch_compiles(monkeypatch, compile_for, architecture, dtype):
    launched = gradient_launches(monkeypatch, dtype)
    own = [each for each in launched if each[0] in GRADIENTS]
    assert {kernel for kernel, *_ in own} == GRADIENTS
    products = GRADIENT_PRODUCTS if dtype != torch.float32 else ()
    assert_compiles(own[:-1], compile_for, architecture, products=products)


@pytest.mark.slow
@EVERY_DTYPE
@EVERY_ARCHITECTURE
def test_kernels_of_forward_compile_as_backward_launches_them(
    monkeypatch, compile_for, architecture, dtype
):
    launched = gradient_launches(monkeypatch, dtype)
    others = [each for each in launched if each[0] not in GRADIENTS] + launched[-3:]
    assert {kernel for kernel, *_ in others} >= PRODUCTS | {scan_kernels.pass_kernel}
    products = PRODUCTS | GRADIENT_PRODUCTS if dtype != torch.float32 else ()
    assert_compiles(others, compile_for, architecture, products=products)
