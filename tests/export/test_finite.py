"""The ends of values, and whether all are finite, of any dtype."""

import pytest
import torch

from megablocks_core.export import finite
from megablocks_core.export.finite import ends, greatest_finite, is_finite
from tests.export.live_bytes import LiveBytes

FLOATING = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATING)
def test_one_value_that_is_not_finite_is_seen(dtype):
    values = torch.linspace(-3, 2, 1001).to(dtype).view(7, 143)
    assert is_finite(values)
    assert ends(values).tolist() == [-3, 2]
    for strange in (torch.inf, -torch.inf, torch.nan):
        for place in ((0, 0), (3, 71), (6, 142)):
            spoilt = values.clone()
            spoilt[place] = strange
            assert not is_finite(spoilt)
            assert not is_finite(spoilt.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern_of_sixteen_bits_is_known(dtype):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert [is_finite(one) for one in every[::7].split(1)] == every[::7].isfinite().tolist()
    edges = torch.cat([every[every.isfinite()].amin()[None], every[every.isfinite()].amax()[None]])
    assert is_finite(edges)
    assert is_finite(every[every.isfinite()])


def test_values_of_other_kinds():
    assert is_finite(torch.arange(3))
    assert is_finite(torch.tensor([True]))
    assert is_finite(torch.empty(0, 4))
    assert is_finite(torch.tensor(1.0))
    assert not is_finite(torch.tensor(torch.nan))
    assert not is_finite(torch.tensor([1, complex(0, torch.inf)]))
    eight = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    assert is_finite(eight)
    assert not is_finite(torch.tensor([torch.nan]).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [*FLOATING, torch.float8_e4m3fn])
def test_the_greatest_of_the_finite_values(dtype):
    values = torch.linspace(-3, 2, 1001).to(dtype)
    assert greatest_finite(values) == 3
    values[[5, 700]] = torch.tensor(torch.nan, dtype=dtype)
    assert greatest_finite(values) == 3
    assert greatest_finite(values[5:6]) == greatest_finite(values[:0]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_a_share_that_is_no_run_of_memory_is_looked_at_in_parts(dtype, monkeypatch):
    """Nor is one that has values to be left out, or numbers that torch does not compare."""
    real = torch.aminmax

    def without_a_copy(values):
        assert values.is_contiguous()
        return real(values)

    monkeypatch.setattr(torch, "aminmax", without_a_copy)
    monkeypatch.setattr(finite, "_PART_BYTES", 4096)
    square = torch.linspace(-3, 2, 500 * 700).to(dtype).view(500, 700)
    for values in (square.t(), square[:, :-1].t(), square[:, ::7]):
        with LiveBytes(values) as live:
            assert is_finite(values)
            found = ends(values).tolist()
        assert found == [-3, values.double().max()]
        assert live.peak <= 16 * 4096, live.peak
    square[2, 3] = torch.tensor(torch.nan, dtype=dtype)
    for values in (square, square.t()):
        with LiveBytes(values) as live:
            assert not is_finite(values)
            assert greatest_finite(values) == 3
        assert live.peak <= 16 * 4096, live.peak
