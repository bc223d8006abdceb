"""The hard metrics follow from the lines and the record, by hand, or say why they are absent."""

import math
import random
from pathlib import Path

import pytest

from megablocks_core.train import Mean
from megablocks_core.train.figures import (
    FIGURES,
    anomalies,
    hard_metrics,
    lines_of_starts,
    set_name,
    total_of,
    validation_sets,
)
from megablocks_core.train.folder import Run
from megablocks_core.train.lines import Line

KEYS = [figure.key for figures in FIGURES.values() for figure in figures]


def start(
    step, *, ended: float | None = 1.0, error=None, recovery=None, flops=2.0, peak=100.0, price=None
):
    return {
        "step": step,
        "started": 0.0,
        "ended": ended,
        "error": error,
        "recovery_seconds": recovery,
        "flops_per_token": flops,
        "peak_flops": peak,
        "price_per_hour": price,
    }


def timed(step, *, tokens, seconds, **values):
    measured = {
        "loss": Mean(4.0 * tokens, tokens),
        "tokens_per_second": Mean(tokens, seconds),
        "step_seconds": Mean(seconds, 1),
    }
    return Line(step, 0.0, {**measured, **values})


def run_of(lines, starts=()):
    return Run(Path("run"), list(lines), list(starts), {})


def test_the_table_has_each_metric_of_the_promise_once():
    promised = """tokens_per_second step_seconds mfu communication_wait_share utilisation
    peak_memory_bytes network_bytes_per_second interruptions errors recovery_seconds loss
    loss_anomalies grad_norm_anomalies data_wait_share read_bytes_per_second token_balance
    checkpoint_seconds cost_per_step cost_per_token idle_cost"""
    assert set(promised.split()) <= set(KEYS) and len(set(KEYS)) == len(KEYS)


def test_a_run_that_tells_nothing_gives_a_reason_for_everything():
    present, absent = hard_metrics(run_of([Line(0, 0.0, {})]))
    assert present == {}
    assert list(absent) == KEYS and all(absent.values())


def test_every_metric_is_present_or_absent_and_never_both():
    run = run_of([timed(0, tokens=10, seconds=2.0)], [start(0)])
    present, absent = hard_metrics(run)
    assert sorted([*present, *absent]) == sorted(KEYS)


def test_speed_by_hand():
    lines = [
        timed(0, tokens=100, seconds=4.0, communication_wait_share=Mean(1.0, 4.0)),
        timed(1, tokens=300, seconds=4.0),
    ]
    present, _ = hard_metrics(run_of(lines, [start(0)]))
    assert present["tokens_per_second"] == 50.0
    assert present["step_seconds"] == 4.0
    assert present["mfu"] == 50.0 * 2.0 / 100.0
    assert present["communication_wait_share"] == 0.25


def test_mfu_uses_the_devices_that_each_start_had():
    lines = [timed(step, tokens=100, seconds=4.0) for step in range(4)]
    run = run_of(lines, [start(0, peak=100.0), start(2, peak=300.0)])
    assert [[line.step for line in part] for part in lines_of_starts(run)] == [[0, 1], [2, 3]]
    assert hard_metrics(run)[0]["mfu"] == pytest.approx(400 * 2.0 / (8 * 100.0 + 8 * 300.0))


def test_a_start_that_was_taken_back_owns_no_line():
    run = run_of([timed(step, tokens=1, seconds=1.0) for step in range(3)], map(start, (0, 2, 0)))
    assert [len(part) for part in lines_of_starts(run)] == [0, 0, 3]


def test_peak_memory_is_the_largest_line():
    lines = [Line(0, 0.0, {"peak_memory_bytes": Mean(peak, 1)}) for peak in (3.0, 9.0, 5.0)]
    assert hard_metrics(run_of(lines))[0]["peak_memory_bytes"] == 9.0


def test_losses_are_those_of_the_last_line_with_their_sign():
    lines = [
        Line(0, 0.0, {"loss": Mean(8.0, 2), "validation_loss": Mean(5.0, 1)}),
        Line(1, 0.0, {"loss": Mean(-3.0, 2)}),
    ]
    present, _ = hard_metrics(run_of(lines))
    assert (present["loss"], present["validation_loss"]) == (-1.5, 5.0)


@pytest.mark.parametrize(
    ("starts", "interruptions", "errors", "recovery"),
    [
        ([start(0)], 0, 0, None),
        ([start(0), start(4)], 0, 0, None),
        ([start(0, ended=None)], 0, 0, None),
        ([start(0, ended=None), start(4, recovery=3.0)], 1, 0, 3.0),
        ([start(0, error="E"), start(4, ended=None), start(4, recovery=2.5)], 2, 1, 2.5),
        ([start(0, error="E")], 1, 1, None),
    ],
)
def test_faults(starts, interruptions, errors, recovery):
    present, absent = hard_metrics(run_of([timed(0, tokens=1, seconds=1.0)], starts))
    assert (present["interruptions"], present["errors"]) == (interruptions, errors)
    assert present.get("recovery_seconds") == recovery
    assert ("recovery_seconds" in absent) == (recovery is None)


def test_costs_by_hand():
    line = timed(
        0,
        tokens=100,
        seconds=10.0,
        data_wait_share=Mean(1.0, 10.0),
        communication_wait_share=Mean(2.0, 10.0),
        checkpoint_seconds=Mean(4.0, 2),
    )
    run = run_of([line], [start(0, ended=None), start(0, recovery=3.0, price=7200.0)])
    present, _ = hard_metrics(run)
    assert present["cost_per_step"] == pytest.approx(20.0)
    assert present["cost_per_token"] == pytest.approx(0.2)
    assert present["idle_cost"] == pytest.approx(2.0 * (1 + 2 + 4 + 3))
    assert hard_metrics(run, price_per_hour=3600.0)[0]["cost_per_step"] == pytest.approx(10.0)
    assert hard_metrics(run, price_per_hour=0.0)[0]["cost_per_step"] == 0.0


def test_anomalies_are_spikes_and_what_is_not_finite():
    random.seed(0)
    noise = [1.0 + random.gauss(0, 0.1) for _ in range(500)]
    assert anomalies(noise) == []
    assert anomalies([*noise[:100], 3.0, *noise[100:]]) == [100]
    assert anomalies([*noise[:3], math.nan, *noise[3:], math.inf]) == [3, 501]


def test_a_falling_loss_and_a_flat_one_are_no_anomalies():
    assert anomalies([5.0 * math.exp(-step / 20) for step in range(200)]) == []
    assert anomalies([2.0] * 50 + [1.0] * 50) == []
    assert anomalies([2.0] * 50 + [2.05] + [2.0] * 10) == []
    assert anomalies([2.0] * 50 + [2.5] + [2.0] * 10) == [50]


def test_a_spike_is_held_against_the_latest_values_only():
    assert anomalies([10.0] * 200 + [1.0] * 60 + [4.0] + [1.0] * 9) == [260]


def test_total_of():
    lines = [Line(0, 0.0, {"a": Mean(1.0, 2)}), Line(1, 0.0, {}), Line(2, 0.0, {"a": Mean(5.0, 2)})]
    assert total_of(lines, "a") == 1.5 and math.isnan(total_of(lines, "b"))


def test_steps_skipped_and_steps_done_again_are_counted():
    lines = [Line(0, 0.0, {"skipped": Mean(2.0, 5)}), Line(5, 0.0, {"skipped": Mean(1.0)})]
    starts = [start(0) | {"repeated_steps": 0}, start(3) | {"repeated_steps": 4}, start(6)]
    present, absent = hard_metrics(run_of(lines, starts))
    assert (present["skipped_steps"], present["repeated_steps"]) == (3, 4)
    _, absent = hard_metrics(run_of([Line(0, 0.0, {})]))
    assert {"skipped_steps", "repeated_steps"} <= absent.keys()


def test_validation_sets_are_found_by_their_names():
    lines = [Line(0, 0.0, {"loss": Mean(1.0), "validation_loss/web": Mean(2.0)})]
    lines += [Line(1, 0.0, {"validation_loss/code": Mean(2.0), "validation_loss": Mean(3.0)})]
    names = validation_sets(lines)
    assert names == ["validation_loss/web", "validation_loss/code", "validation_loss"]
    assert [set_name(name) for name in names] == ["web", "code", "validation"]
    assert "validation_loss/NAME" in hard_metrics(run_of(lines[:1]))[1]["validation_loss"]
