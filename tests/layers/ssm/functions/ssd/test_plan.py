"""Plans hold every chunk and every head once, and as many at a time as they say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.layers.ssm.functions.ssd import plan
from megablocks_core.layers.ssm.functions.ssd.plan import EVERY, count_kept, plan_of, regions


@pytest.fixture
def room(monkeypatch):
    return lambda numbers: monkeypatch.setattr(plan, "_ON_CPU", numbers)


def _plan(heads, groups, length=256, features=8):
    return plan_of(torch.empty(3, length, heads, features), torch.empty(3, length, groups, 4), 8)


@pytest.mark.parametrize("heads, groups", [(1, 1), (4, 1), (12, 3), (6, 6), (7, 1)])
@pytest.mark.parametrize("numbers", [1, 1500, 3000, 5000, 1 << 14, 1 << 20])
def test_every_head_is_in_one_lane(room, heads, groups, numbers):
    room(numbers)
    found = _plan(heads, groups)
    taken = torch.zeros(1, 1, groups, 1, heads // groups)
    by_head = torch.zeros(heads)
    for lane in found.lanes:
        lane.of(taken).add_(1)
        by_head[lane.heads] += 1
        assert lane.of(taken).numel() == lane.heads.stop - lane.heads.start
    assert (taken == 1).all() and (by_head == 1).all()
    if len(found.lanes) > 1:
        assert found.rows == found.chunks == 1
    assert EVERY % found.chunks == 0


def test_short_rows_are_taken_together_and_long_ones_alone(room):
    room(1 << 14)
    assert _plan(4, 1, length=8).rows > 1
    assert _plan(4, 1, length=1024).rows == 1


@given(
    length=st.integers(0, 100),
    chunk_size=st.integers(1, 9),
    every=st.sampled_from([1, 8]),
    batch=st.integers(0, 4),
    rows=st.integers(1, 3),
)
def test_regions_cover_every_token_once(length, chunk_size, every, batch, rows):
    x = torch.zeros(batch, length, 1)
    for parts in regions(x, chunk_size, every, rows):
        kept = 0
        for region in parts:
            assert region.kept == kept and region.chunk * chunk_size == region.start
            kept += -(-region.number // every)
            view = region.of(x)
            assert view.shape[0] == region.number and view.shape[2] == region.length
            view.add_(1)
        assert kept == count_kept(length, chunk_size, every)
    assert (x == 1).all()
