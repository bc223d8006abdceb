"""All ranks take a step or none does, and what is skipped leaves no trace."""

import json
import math
from statistics import median

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import Mesh, gather_whole
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    clip_grad_norm_,
    reduce_gradients,
)
from megablocks_core.testing import ranks
from megablocks_core.train import FiniteGuard, Scheduled, SpikeGuard, linear_schedule

BAD = [math.nan, math.inf, -math.inf]


@ranks(1, 2, 4)
def test_a_value_that_is_not_finite_on_one_rank_stops_all():
    group = Mesh().group("dp")
    guard = FiniteGuard(group=group)
    last = group.rank == group.size - 1
    for bad in BAD:
        assert guard({"loss": -2.5, "norm": torch.tensor(3.0)})
        assert not guard({"loss": bad if last else 1.0, "norm": 2.0})
        assert not guard({"loss": 1.0, "norm": torch.tensor(bad if last else 2.0)})
    assert guard.skipped == 6
    with CommDebugMode() as traffic:
        guard({"loss": 1.0, "norm": 2.0})
    assert traffic.get_total_counts() == (group.size > 1)


@ranks(1, 2)
def test_raising_names_values_and_ranks_on_all_ranks():
    group = Mesh().group("dp")
    guard = FiniteGuard(policy="raise", group=group)
    last = group.size - 1
    values = {"loss": math.inf if group.rank == last else 1.0, "norm": math.nan}
    with pytest.raises(FloatingPointError) as caught:
        guard(values)
    ranks_without_norm = ", ".join(f"norm=nan on rank {rank}" for rank in range(last))
    expected = f"loss=inf on rank {last}, norm=nan on rank {last}"
    assert str(caught.value).endswith(f"{ranks_without_norm}, {expected}" if last else expected)
    assert guard({"loss": 1.0, "norm": 1.0})  # the ranks are still in step


def test_patience_ends_and_starts_again_after_a_sound_step():
    guard = FiniteGuard(patience=2)
    for _ in range(3):
        assert not guard({"norm": math.nan}) and not guard({"norm": math.nan})
        assert guard({"norm": 1.0})
    for _ in range(2):
        guard({"norm": math.nan})
    resumed = FiniteGuard(patience=2)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for each in (guard, resumed):
        with pytest.raises(FloatingPointError, match="3 steps in a row: must be finite: norm=nan"):
            each({"norm": math.nan})
        assert each.skipped == 9


def small_model(tp):
    torch.manual_seed(0)
    return nn.Sequential(
        ColumnParallelLinear(6, 8, group=tp), nn.Tanh(), RowParallelLinear(8, 2, group=tp)
    ).double()


def trained(batches, *, mesh, guard):
    """Weights after steps over ``batches``, the rate, and how many steps were taken."""
    tp, dp = mesh.group("tp"), mesh.group("dp")
    model = small_model(tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rate, taken = Scheduled(optimizer, linear_schedule(100)), 0
    for consumed, batch in batches:
        rate.set(consumed)
        own = batch.chunk(dp.size)[dp.rank]
        model(own).square().sum().backward()
        reduce_gradients(model, group=dp, reduction="sum")
        if guard({"grad_norm": clip_grad_norm_(model, 1.0)}):
            optimizer.step()
            taken += 1
        optimizer.zero_grad()
    steps = {state["step"].item() for state in optimizer.state.values()}
    assert steps == {taken}
    return gather_whole(model), optimizer.param_groups[0]["lr"], taken


@ranks(1, 2, 4)
def test_a_skipped_step_is_as_if_its_batch_had_not_been_there():
    """NaN in the tokens of one rank; the guard over LOCAL hears of it through the norm alone."""
    size = Mesh().size("dp")
    mesh = Mesh(tp=2 if size == 4 else 1)
    generator = torch.Generator().manual_seed(3)
    batches = list(enumerate(torch.randn(5, 4, 6, generator=generator, dtype=torch.float64)))
    broken = [(at, batch.clone()) for at, batch in batches]
    broken[2][1][-1, 3] = math.nan
    with CommDebugMode() as traffic:
        FiniteGuard()({"grad_norm": 1.0})
    assert traffic.get_total_counts() == 0
    guard = FiniteGuard()
    after, rate, taken = trained(broken, mesh=mesh, guard=guard)
    without = [pair for at, pair in enumerate(batches) if at != 2]
    expected, expected_rate, _ = trained(without, mesh=mesh, guard=FiniteGuard())
    assert (taken, guard.skipped, rate) == (4, 1, expected_rate)
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name


def past_of(guard, name="loss"):
    return guard.state_dict()["past"][name]


def noisy(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return (2.0 + 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)).tolist()


def test_a_spike_is_skipped_and_a_fall_is_not():
    guard = SpikeGuard(window=16, threshold=5.0)
    assert all(guard({"loss": value}) for value in noisy(0, 40))
    window = past_of(guard)
    assert len(window) == 16
    middle = median(window)
    spread = 1.4826 * median(abs(value - middle) for value in window)
    assert spread > 0.01 * middle
    assert not guard({"loss": middle + 5.01 * spread})
    assert not guard({"loss": math.nan}) and not guard({"loss": math.inf})
    assert past_of(guard) == window  # what was skipped is not part of the past
    assert guard({"loss": middle + 4.99 * spread}) and guard({"loss": -30.0})
    assert guard.skipped == 3


def test_nothing_is_judged_at_first_and_a_still_window_makes_no_spike():
    guard = SpikeGuard(window=16)
    assert all(guard({"loss": value}) for value in (1.0, 100.0, 1.0, 50.0))
    guard = SpikeGuard(window=16)
    assert all(guard({"loss": 2.0}) for _ in range(8))
    assert guard({"loss": 2.1}) and not guard({"loss": 2.4})
    guard = SpikeGuard(window=16)  # negative losses too
    assert all(guard({"loss": -2.0}) for _ in range(8))
    assert guard({"loss": -1.9}) and not guard({"loss": -1.6})


@ranks(1, 2, 4)
def test_the_mean_over_all_ranks_is_judged_and_a_resume_changes_no_answer():
    group = Mesh().group("dp")
    alone, guard = SpikeGuard(window=16), SpikeGuard(window=16, group=group)
    for step, value in enumerate(noisy(1, 30)):
        value = 9.0 if step in (12, 20) else value
        count = 2.0 + group.rank
        total = 2.0 * group.size + group.size * (group.size - 1) / 2
        norm = torch.tensor(value / 2)
        own = torch.tensor(value * total / group.size, dtype=torch.float64)  # uneven counts
        assert guard({"loss": (own, count), "norm": norm}) == alone({"loss": value, "norm": norm})
        if step % 7 == 6:
            state = json.loads(json.dumps(guard.state_dict()))
            assert group.all_gather_object(state) == [state] * group.size
            guard = SpikeGuard(window=16, group=group)
            guard.load_state_dict(state)
    assert guard.skipped == alone.skipped == 2
    assert past_of(guard) == pytest.approx(past_of(alone), rel=1e-14)


def test_a_spike_can_raise_and_a_level_that_has_moved_ends_patience():
    guard = SpikeGuard(window=16, policy="raise")
    assert all(guard({"norm": value}) for value in noisy(2, 8))
    with pytest.raises(ArithmeticError, match=r"norm=50 must not be above 2\.\d+, after a median"):
        guard({"norm": 50.0})
    guard = SpikeGuard(window=16, patience=3)
    assert all(guard({"norm": value}) for value in noisy(2, 8))
    with pytest.raises(ArithmeticError, match="4 steps in a row: norm=50 must not"):
        for _ in range(10):
            guard({"norm": 50.0})
    with pytest.raises(FloatingPointError, match="rank 0"):
        FiniteGuard(policy="raise")({"norm": math.nan})


def test_a_value_without_a_count_does_not_pass():
    assert not SpikeGuard()({"loss": (0.0, 0)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FiniteGuard(policy="rerun"), "policy='rerun' must be one of skip, raise"),
        (lambda: SpikeGuard(patience=-1), "patience=-1 must not be negative"),
        (lambda: FiniteGuard(patience=math.nan), "patience=nan must not be negative"),
        (lambda: SpikeGuard(window=3), "window=3 must be a whole number of at least 4"),
        (lambda: SpikeGuard(window=4.5), "window=4.5 must be a whole number of at least 4"),
        (lambda: FiniteGuard()({}), "values={} must hold a value"),
        (lambda: SpikeGuard()({}), "values={} must hold a value"),
        (lambda: SpikeGuard(threshold=0.0), "threshold=0.0 must be positive"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@ranks(2)
def test_a_gradient_of_one_tensor_parallel_rank_stops_all_without_a_message():
    """The norm over tp is one number on every rank, so each may judge it alone."""
    tp = Mesh(tp=2).group("tp")
    model = small_model(tp)
    model(torch.ones(3, 6, dtype=torch.float64)).square().sum().backward()
    if tp.rank == 1:
        next(model.parameters()).grad[0, 0] = math.inf
    norm = clip_grad_norm_(model, 1.0)
    assert tp.all_gather_object(FiniteGuard()({"norm": norm})) == [False, False]


@pytest.mark.parametrize("guard", [FiniteGuard(), SpikeGuard()])
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"state=\[\] must have (past|skipped, in_a_row)"),
        ({"past": {}, "skipped": 1}, r"state=\['past', 'skipped'\] must have in_a_row"),
        (None, "state of type NoneType must be a dict from state_dict"),
    ],
)
def test_a_state_without_its_counts_is_refused_and_changes_nothing(guard, state, message):
    before = guard.state_dict()
    with pytest.raises(ValueError, match=message):
        guard.load_state_dict(state)
    assert guard.state_dict() == before


def test_a_window_that_is_none_is_refused():
    guard = SpikeGuard()
    with pytest.raises(ValueError, match="state of type list must be a dict"):
        guard.load_state_dict({"past": [], "skipped": 1, "in_a_row": 1})
    assert guard.skipped == 0
