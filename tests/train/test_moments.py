"""Statistics are those of the whole tensor, exactly, however it is cut into parts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.train import moments
from megablocks_core.train.moments import WIDTH, add_rows, row_of, statistics

numbers = st.lists(st.floats(-1e3, 1e3, width=32) | st.just(0.0), min_size=1, max_size=40)


def by_hand(values):
    count = len(values)
    squares = math.fsum(value**2 for value in values)
    return {
        "norm": math.sqrt(squares),
        "mean": math.fsum(values) / count,
        "rms": math.sqrt(squares / count),
        "max_abs": max(map(abs, values)),
        "zeros": values.count(0.0) / count,
        "nonfinite": 0.0,
    }


@given(values=numbers, cut=st.integers(1, 40))
def test_statistics_of_parts_are_those_of_the_whole(values, cut):
    total = torch.zeros(WIDTH, dtype=torch.float64)
    for part in torch.tensor(values).split(cut):
        add_rows(total, row_of(part))
    found = dict(statistics(total.tolist(), copies=1.0))
    assert found == pytest.approx(by_hand(values), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_do_not_show(dtype, monkeypatch):
    monkeypatch.setattr(moments, "_CPU_BLOCK", 7)
    x = torch.randn(5, 10).to(dtype)
    x[0, 3] = 0.0
    found = dict(statistics(row_of(x.T).tolist(), copies=1.0))
    assert found == pytest.approx(by_hand(x.double().flatten().tolist()), rel=1e-12)


def test_sums_of_many_float32_squares_lose_nothing():
    """Each of these squares has more digits than a float32 holds."""
    x = torch.full((1 << 22,), 1 + 2**-12)
    assert row_of(x).tolist()[2] == (1 + 2**-12) ** 2 * (1 << 22)


def test_what_is_not_finite_is_counted_and_shows_in_the_rest():
    row = row_of(torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0]))
    found = dict(statistics(row.tolist(), copies=1.0))
    assert found["nonfinite"] == 0.6 and found["zeros"] == 0.2
    assert math.isnan(found["mean"]) and math.isnan(found["max_abs"])
    found = dict(statistics(row_of(torch.tensor([1.0, -math.inf])).tolist(), copies=1.0))
    assert found["max_abs"] == found["norm"] == math.inf


def test_the_tensor_is_left_as_it_was():
    x = torch.randn(9, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    row = row_of(x)
    assert torch.equal(x, before) and not row.requires_grad


def test_copies_bend_the_norm_alone_and_without_them_there_is_none():
    once, twice = (row_of(torch.tensor([3.0, 4.0] * times)).tolist() for times in (1, 2))
    assert statistics(twice, copies=2.0) == statistics(once, copies=1.0)
    assert statistics(twice, copies=None) == statistics(once, copies=1.0)[1:]


def test_nothing_has_no_statistics():
    assert statistics(row_of(torch.empty(0, 3)).tolist(), copies=1.0) == []
