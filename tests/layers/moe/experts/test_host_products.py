"""Products on a CPU: oneDNN's and MKL's are equal but for rounding, and asked for where it pays."""

import pytest
import torch

from megablocks_core.layers.moe.experts import host_products
from megablocks_core.layers.moe.experts.host_products import add_multiplied, multiply, row_step

_native = host_products._native


@pytest.fixture(params=["oneDNN", "MKL"])
def library(request, monkeypatch):
    """Whichever is asked for products in float32."""
    monkeypatch.setattr(host_products, "_onednn_is_faster", lambda: request.param == "oneDNN")
    return request.param


def _noted(monkeypatch):
    noted, by_onednn = [], host_products._by_onednn
    monkeypatch.setattr(
        host_products, "_by_onednn", lambda *pair: (noted.append(1), by_onednn(*pair))[1]
    )
    return noted


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("a_turned", (False, True))
@pytest.mark.parametrize("b_turned", (False, True))
def test_as_a_product_in_float64(a_turned, b_turned, dtype, library, monkeypatch):
    noted = _noted(monkeypatch)
    a = torch.randn(7, 33).t() if a_turned else torch.randn(33, 7)
    b = torch.randn(20, 7).t() if b_turned else torch.randn(7, 20)
    a, b = a.to(dtype), b.to(dtype)
    exact, out = a.double() @ b.double(), torch.full((40, 20), torch.nan, dtype=dtype)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype]
    multiply(a, b, out=out[:33])
    assert (out[:33] - exact).norm() <= tolerance * exact.norm()
    add_multiplied(a, b, to=out[:33])
    assert (out[:33] - 2 * exact).norm() <= 2 * tolerance * exact.norm()
    assert out[33:].isnan().all()
    assert len(noted) == (2 if (library, dtype) == ("oneDNN", torch.float32) else 0)


@pytest.mark.parametrize("shape", ((0, 4, 3), (5, 0, 3), (5, 4, 0)))
def test_sums_and_sides_of_nothing(shape, library):
    rows, summed, columns = shape
    a, b, out = torch.ones(rows, summed), torch.ones(summed, columns), torch.ones(rows, columns)
    add_multiplied(a, b, to=out)
    assert torch.equal(out, torch.full((rows, columns), 1.0 + summed))
    multiply(a, b, out=out)
    assert torch.equal(out, torch.full((rows, columns), float(summed)))


def test_who_is_asked(library):
    assert row_step(torch.bfloat16) == row_step(torch.float16) == 64
    assert row_step(torch.float32) == (64 if library == "oneDNN" else 1)
    assert row_step(torch.float64) == 1


@pytest.mark.skipif(_native is None, reason="without the extension MKL is asked")
@pytest.mark.parametrize("is_intel", (False, True))
@pytest.mark.parametrize("capability", ("AVX2", "AVX512"))
def test_onednn_where_mkl_leaves_avx512_out(capability, is_intel, monkeypatch):
    monkeypatch.setattr(_native, "is_intel", lambda: is_intel)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert row_step(torch.float32) == (64 if capability == "AVX512" and not is_intel else 1)


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr(host_products, "_native", None)
    assert row_step(torch.float32) == 1
