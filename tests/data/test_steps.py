"""Step numbers and the samples they begin at follow each other by arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data.steps import Skips, StepPlan, as_stages, value_at


def plain_starts(stages, sample, end):
    """Walk through the steps one by one."""
    starts, now = [], 0
    while now < end:
        starts.append(now)
        size = [size for start, size in stages if start <= now][-1]
        now = sample if now < sample < now + size else now + size
    return [*starts, now]


@st.composite
def schedules(draw):
    starts = sorted(draw(st.sets(st.integers(1, 60), max_size=4)))
    return [(start, draw(st.integers(1, 9))) for start in [0, *starts]]


@given(stages=schedules(), sample=st.integers(0, 100))
def test_steps_equal_those_walked_one_by_one(stages, sample):
    plan = StepPlan(stages, sample=sample)
    starts = plain_starts(stages, sample, 120)
    assert [plan.start(step) for step in range(len(starts))] == starts
    assert plan.start(plan.step_at(sample)) == sample
    for now in range(120):
        step = next(step for step, start in enumerate(starts) if start >= now)
        assert plan.step_at(now) == step
        assert plan.num_steps(now, drop_last=False) == step
        whole = step if starts[step] == now else step - 1
        assert plan.num_steps(now, drop_last=True) == whole


def test_numbers_of_any_size_are_exact():
    plan = StepPlan([(0, 3), (2**40 + 1, 7)])
    first = -(-(2**40 + 1) // 3)
    assert plan.start(first) == 3 * first
    assert plan.start(first + 2**50) == 3 * first + 7 * 2**50
    assert plan.step_at(3 * first + 7 * 2**50 + 1) == first + 2**50 + 1


def test_a_schedule_holds_from_its_sample_on():
    stages = as_stages([(0, 4), (10, 8)])
    assert [value_at(stages, sample) for sample in (0, 9, 10, 99)] == [4, 4, 8, 8]


@given(
    ranges=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 30)).filter(lambda r: r[0] < r[1]), max_size=5
    ),
    step=st.integers(0, 30),
    count=st.integers(0, 20),
)
def test_skipped_steps_are_left_out_and_no_others(ranges, step, count):
    skips = Skips(ranges)
    left = [n for n in range(200) if not any(a <= n < b for a, b in ranges)]
    assert skips.nth(step, count) == [n for n in left if n >= step][count]
    assert skips.left(step, step + count) == len([n for n in left if step <= n < step + count])
    assert skips.left(step + 1, step) == 0


@pytest.mark.parametrize("ranges", [[(3, 3)], [(4, 2)], [(-1, 2)]])
def test_ranges_that_skip_nothing_are_refused(ranges):
    with pytest.raises(ValueError, match="must hold ranges"):
        Skips(ranges)
