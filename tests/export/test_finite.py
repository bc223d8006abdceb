"""The ends of values, and whether all are finite, of any dtype."""

import pytest
import torch

from megablocks_core.export.finite import ends, is_finite

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
