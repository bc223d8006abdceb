"""Schedules have the values of hand, of torch and of transformers, and no state."""

import math
import warnings

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from transformers import (
    get_cosine_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from megablocks_core.train import (
    Constant,
    InverseSquareRoot,
    Product,
    Ramp,
    Stages,
    constant_schedule,
    cosine_schedule,
    inverse_square_root_schedule,
    linear_schedule,
    warmup_stable_decay_schedule,
)

lengths = st.floats(1e-3, 1e13)
factors = st.floats(1e-3, 10.0)
shapes = st.sampled_from(["linear", "cosine", "exponential", "minus_sqrt"])


def peer(make, steps):
    """The factors of a torch scheduler at steps 0, 1, ..."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, found = make(optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer step was taken
        for _ in range(steps):
            found.append(scheduler.get_last_lr()[0])
            scheduler.step()
    return found


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ("linear", [1.0, 0.8, 0.6, 0.2, 0.2]),
        ("cosine", [1.0, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.2, 0.2]),
        ("exponential", [1.0, 0.2**0.25, math.sqrt(0.2), 0.2, 0.2]),
        ("minus_sqrt", [1.0, 0.6, 1 - 0.8 * math.sqrt(0.5), 0.2, 0.2]),
    ],
)
def test_a_ramp_has_the_values_of_hand(shape, values):
    ramp = Ramp(8, start=1.0, end=0.2, shape=shape)
    assert [ramp(at) for at in (0, 2, 4, 8, 9)] == pytest.approx(values, rel=1e-15)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (constant_schedule(), lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        (Ramp(7, start=0.25), lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=7)),
        (cosine_schedule(29, end=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 29, 0.1)),
        (Ramp(30, 1.0, 0.9**30, "exponential"), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        (
            Stages((Ramp(5, start=0.2), Ramp(20, start=1.0, end=0.0))),
            lambda o: lr_scheduler.SequentialLR(
                o,
                [
                    lr_scheduler.LinearLR(o, 0.2, total_iters=5),
                    lr_scheduler.PolynomialLR(o, total_iters=20),
                ],
                milestones=[5],
            ),
        ),
        (cosine_schedule(25, warmup=4), lambda o: get_cosine_schedule_with_warmup(o, 4, 25)),
        (linear_schedule(25, warmup=4), lambda o: get_linear_schedule_with_warmup(o, 4, 25)),
        (inverse_square_root_schedule(warmup=4), lambda o: get_inverse_sqrt_schedule(o, 4)),
        (
            inverse_square_root_schedule(warmup=4, scale=9),
            lambda o: get_inverse_sqrt_schedule(o, 4, timescale=9),
        ),
        *(
            (
                warmup_stable_decay_schedule(25, warmup=4, decay=8, shape=ours, end=end),
                lambda o, theirs=theirs, end=end: get_wsd_schedule(
                    o, 4, 8, num_training_steps=25, decay_type=theirs, min_lr_ratio=end
                ),
            )
            for ours, theirs, end in [
                ("linear", "linear", 0.0),
                ("cosine", "cosine", 0.0),
                ("minus_sqrt", "1-sqrt", 0.0),
            ]
        ),
    ],
)
def test_the_factors_are_those_of_torch_and_transformers(ours, theirs):
    expected = peer(theirs, 26)  # beyond their end some rise again
    assert [ours(step) for step in range(len(expected))] == pytest.approx(expected, abs=1e-12)


@given(length=lengths, start=factors, end=factors, shape=shapes, t=st.floats(0, 1))
def test_a_ramp_stays_between_its_ends_and_does_not_turn_back(length, start, end, shape, t):
    ramp = Ramp(length, start, end, shape)
    assert ramp(0) == pytest.approx(start) and ramp(length) == end == ramp(2 * length)
    low, high = min(start, end), max(start, end)
    here, later = ramp(t * length / 2), ramp(t * length)
    assert low * (1 - 1e-12) <= here <= high * (1 + 1e-12)
    assert (later - here) * (end - start) >= -1e-12


@given(
    length=st.floats(10, 1e13),
    warmup=st.floats(0.01, 0.4),
    decay=st.floats(0.01, 0.5),
    shape=shapes,
    end=st.floats(0.01, 1.0),
)
def test_warm_up_stable_and_decay_meet(length, warmup, decay, shape, end):
    warmup, decay = warmup * length, decay * length
    schedules = [
        warmup_stable_decay_schedule(length, warmup=warmup, decay=decay, shape=shape, end=end),
        cosine_schedule(length, warmup=warmup, end=end),
        linear_schedule(length, warmup=warmup, end=end),
        inverse_square_root_schedule(warmup=warmup),
        constant_schedule(warmup=warmup),
    ]
    for schedule in schedules:
        for joint in (warmup, length - decay):
            before, after = schedule(joint * (1 - 1e-9)), schedule(joint * (1 + 1e-9))
            assert before == pytest.approx(after, abs=1e-3 if shape == "minus_sqrt" else 1e-6)
        assert schedule(0) == 0 and schedule(warmup) == pytest.approx(1.0)
    assert schedules[0](length) == pytest.approx(end, rel=1e-9)


@given(unit=st.integers(1, 10**6), step=st.integers(0, 50))
def test_tokens_samples_and_steps_are_one_schedule(unit, step):
    by_step = cosine_schedule(40, warmup=10, end=0.1)
    by_token = cosine_schedule(40 * unit, warmup=10 * unit, end=0.1)
    assert by_token(step * unit) == pytest.approx(by_step(step), abs=1e-12)


@given(length=st.floats(100, 1e12), more=st.floats(1, 10), t=st.floats(0, 1))
def test_a_longer_run_has_the_same_factors_until_the_decay(length, more, t):
    warmup, decay = 0.1 * length, 0.2 * length
    first, longer = (
        warmup_stable_decay_schedule(total, warmup=warmup, decay=decay)
        for total in (length, more * length)
    )
    position = t * (length - decay)
    assume(position < length - decay)
    assert first(position) == longer(position)


def test_a_joint_belongs_to_the_next_stage_which_counts_from_there():
    schedule = Stages((Constant(0.5, length=10), lambda position: 100 + position))
    assert [schedule(at) for at in (0, 9, 10, 12)] == [0.5, 0.5, 100, 102]
    assert Stages((Ramp(3), Stages((Constant(length=4), Ramp(2))))).length == 9


def test_a_product_multiplies():
    schedule = Product((Ramp(10), Ramp(20, start=1.0, end=0.0)))
    assert schedule(5) == 0.5 * 0.75
    assert schedule.length == 20


def test_f_142_a_resumed_run_has_the_rate_of_its_step():
    schedule = constant_schedule(warmup=10)
    assert schedule(4) == 0.4


def test_schedules_are_equal_and_print_by_their_values():
    one, other = (linear_schedule(100, warmup=10) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert repr(Stages((Ramp(10), InverseSquareRoot(4)))) == (
        "Stages(stages=(Ramp(length=10, start=0.0, end=1.0, shape='linear'), "
        "InverseSquareRoot(scale=4, length=inf)))"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ramp(0), "length=0 must be positive and finite"),
        (lambda: Ramp(math.inf), "length=inf must be positive and finite"),
        (lambda: Ramp(math.nan), "length=nan must be positive"),
        (lambda: Ramp(1, shape="square"), "shape='square' must be one of linear, cosine"),
        (lambda: Ramp(1, start=-0.1), "start=-0.1 must be 0 or more"),
        (lambda: Ramp(1, 1.0, 0.0, "exponential"), "end=0.0 must be positive"),
        (lambda: Constant(math.nan), "factor=nan must be 0 or more"),
        (lambda: Constant(length=-1), "length=-1 must be positive"),
        (lambda: InverseSquareRoot(0), "scale=0 must be positive"),
        (lambda: Stages(()), "must be one or more"),
        (lambda: Stages((Constant(), Ramp(1))), "which must be finite"),
        (lambda: Product(()), "must be one or more"),
        (lambda: cosine_schedule(10, warmup=10), "length=10 must be above warmup=10"),
        (lambda: linear_schedule(10, warmup=-1), "warmup=-1 must not be negative"),
        (lambda: inverse_square_root_schedule(warmup=0), "scale=0 must be positive"),
        (
            lambda: warmup_stable_decay_schedule(10, warmup=6, decay=5),
            "warmup=6 and decay=5 must fit into length=10",
        ),
        (lambda: Ramp(5)(-1), "position=-1 must not be negative"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
