"""The hard metrics of a run: each with its unit and meaning, or the reason why it is absent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megablocks_core.train.folder import Run, ended_well
from megablocks_core.train.lines import Line
from megablocks_core.train.metrics import Mean, pooled
from megablocks_core.train.spikes import usual

_VALIDATION = "validation_loss"


class Figure(NamedTuple):
    """What a hard metric is, and what it means when a run does not tell it."""

    key: str
    unit: str
    meaning: str
    absent: str


_UNTIMED = "the run timed no step (StepTimer)"
_UNNAMED = "none was measured, or only sets with names (validation_loss/NAME)"
_UNPRICED = "no price was given (--price-per-hour), or no step was timed"

FIGURES = {
    "Speed": (
        Figure("tokens_per_second", "1/s", "tokens of all ranks, over seconds of steps", _UNTIMED),
        Figure("step_seconds", "s", "mean step, without checkpoints and evaluation", _UNTIMED),
        Figure(
            "mfu",
            "share",
            "model FLOPs of the tokens, of what the devices can do",
            "the record lacks flops_per_token or peak_flops, or no step was timed",
        ),
        Figure(
            "communication_wait_share",
            "share",
            "of sampled steps: a collective under way and the rank computing nothing",
            "no step was sampled (StepTimer(sample_every=...))",
        ),
    ),
    "Machine": (
        Figure("utilisation", "share", "processor time used, of all usable cores", _UNTIMED),
        Figure("peak_memory_bytes", "B", "the most that any one rank held", _UNTIMED),
        Figure(
            "network_bytes_per_second",
            "B/s",
            "sent by the machines, loopback included",
            "the machine does not tell (no /proc/net/dev), or no step was timed",
        ),
    ),
    "Faults": (
        Figure("interruptions", "", "starts that were killed or failed", "the run has no record"),
        Figure("errors", "", "starts that ended in an exception", "the run has no record"),
        Figure(
            "recovery_seconds",
            "s",
            "from the last line before an interruption to the first after it, in all",
            "nothing was recovered from",
        ),
        Figure(
            "repeated_steps",
            "",
            "written before, and done again by a later start",
            "the run has no record",
        ),
    ),
    "Training": (
        Figure("loss", "nats", "training loss of the last line", "no finite loss was written"),
        Figure("validation_loss", "nats", "the last one measured", _UNNAMED),
        Figure("loss_anomalies", "", "not finite, or far above the median before", "no loss"),
        Figure("grad_norm_anomalies", "", "the same of the gradient norm", "no grad_norm"),
        Figure(
            "skipped_steps",
            "",
            "that a guard did not let through",
            'no guard told (a metric "skipped": 1 where a step was skipped, else 0)',
        ),
    ),
    "Data": (
        Figure("data_wait_share", "share", "of step time: waiting for the next batch", _UNTIMED),
        Figure(
            "read_bytes_per_second",
            "B/s",
            "bytes of samples that the ranks asked for",
            "the bytes read were not counted (StepTimer.step(read_bytes=...))",
        ),
        Figure("token_balance", "max/mean", "tokens of the fullest rank over the mean", _UNTIMED),
    ),
    "Checkpoints": (
        Figure(
            "checkpoint_seconds", "s", "mean time the loop stood still for one", "none was timed"
        ),
    ),
    "Cost": (
        Figure("cost_per_step", "price", "price of the machines during a mean step", _UNPRICED),
        Figure("cost_per_token", "price", "price of the machines during a token", _UNPRICED),
        Figure(
            "idle_cost",
            "price",
            "price of waiting for data, ranks, checkpoints and recovery, in all",
            _UNPRICED,
        ),
    ),
}


def hard_metrics(
    run: Run, *, price_per_hour: float | None = None
) -> tuple[dict[str, float], dict[str, str]]:
    """The metrics of ``FIGURES`` that ``run`` tells, and why each other one is absent.

    ``price_per_hour`` is that of all machines together, in any currency; where it is not given,
    that of the run's last record counts.
    """
    figures = [figure for group in FIGURES.values() for figure in group]
    found = {figure.key: float(total_of(run.lines, figure.key)) for figure in figures}
    found.update(_training(run.lines))
    found["peak_memory_bytes"] = max(_column(run.lines, "peak_memory_bytes"), default=math.nan)
    found["mfu"] = _mfu(run)
    if run.starts:
        found.update(_faults(run))
        if price_per_hour is None:
            price_per_hour = run.starts[-1].get("price_per_hour")
    if price_per_hour is not None:
        found.update(_costs(run.lines, found, price_per_hour))
    present = {key: value for key, value in found.items() if math.isfinite(value)}
    return present, {f.key: f.absent for f in figures if f.key not in present}


def total_of(lines: Sequence[Line], name: str) -> Mean:
    """Sum and count of metric ``name`` over ``lines``."""
    return pooled(line.values[name] for line in lines if name in line.values)


def validation_sets(lines: Sequence[Line]) -> list[str]:
    """Names of the metrics that are validation losses: of the one set, or of several by name."""
    names = dict.fromkeys(name for line in lines for name in line.values)
    return [name for name in names if name == _VALIDATION or name.startswith(f"{_VALIDATION}/")]


def set_name(metric: str) -> str:
    """What a validation loss is of: the set's own name, or "validation" of the only one."""
    return metric.removeprefix(f"{_VALIDATION}/") if "/" in metric else "validation"


def anomalies(values: Sequence[float], *, window: int = 50, threshold: float = 6.0) -> list[int]:
    """Places where a value is not finite, or stands far above the median of those before it.

    Far is ``threshold`` spreads, by the rule of ``spikes``, of up to ``window`` finite values
    before, once there are 10. A loss that falls fast is no anomaly.
    """
    found: list[int] = []
    before: list[float] = []
    for place, value in enumerate(values):
        if not math.isfinite(value):
            found.append(place)
            continue
        if len(before) >= 10 and value > usual(before, threshold=threshold).most:
            found.append(place)
        before = [*before, value][-window:]
    return found


def lines_of_starts(run: Run) -> list[list[Line]]:
    """The lines that each start of the record wrote and no later one took back."""
    firsts = [start["step"] for start in run.starts]
    ends = [min(firsts[place + 1 :], default=math.inf) for place in range(len(firsts))]
    return [
        [line for line in run.lines if first <= line.step < end]
        for first, end in zip(firsts, ends, strict=True)
    ]


def _training(lines: Sequence[Line]) -> dict[str, float]:
    losses, norms = _column(lines, "loss"), _column(lines, "grad_norm")
    validation = _column(lines, "validation_loss")
    skipped = total_of(lines, "skipped")
    return {
        "loss": losses[-1] if losses else math.nan,
        "validation_loss": validation[-1] if validation else math.nan,
        "loss_anomalies": len(anomalies(losses)) if losses else math.nan,
        "grad_norm_anomalies": len(anomalies(norms)) if norms else math.nan,
        "skipped_steps": skipped.sum if skipped.count else math.nan,
    }


def _mfu(run: Run) -> float:
    """FLOPs done over FLOPs possible, with the peak of the devices that each start had."""
    done = possible = 0.0
    for start, lines in zip(run.starts, lines_of_starts(run), strict=True):
        if start.get("flops_per_token") and start.get("peak_flops"):
            speed = total_of(lines, "tokens_per_second")
            done += speed.sum * start["flops_per_token"]
            possible += speed.count * start["peak_flops"]
    return done / possible if possible else math.nan


def _faults(run: Run) -> dict[str, float]:
    *earlier, last = run.starts
    recoveries = [s["recovery_seconds"] for s in run.starts if s["recovery_seconds"] is not None]
    return {
        "interruptions": sum(not ended_well(s) for s in earlier) + (last["error"] is not None),
        "errors": sum(start["error"] is not None for start in run.starts),
        "recovery_seconds": math.fsum(recoveries) if recoveries else math.nan,
        "repeated_steps": sum(start.get("repeated_steps") or 0 for start in run.starts),
    }


def _costs(
    lines: Sequence[Line], found: dict[str, float], price_per_hour: float
) -> dict[str, float]:
    price = price_per_hour / 3600
    step_time = total_of(lines, "step_seconds").sum
    idle = [
        step_time * found["data_wait_share"],
        step_time * found["communication_wait_share"],
        total_of(lines, "checkpoint_seconds").sum,
        found["recovery_seconds"],
    ]
    return {
        "cost_per_step": price * found["step_seconds"],
        "cost_per_token": price / (found["tokens_per_second"] or math.nan),
        "idle_cost": price * math.fsum(part for part in idle if math.isfinite(part)),
    }


def _column(lines: Sequence[Line], name: str) -> list[float]:
    return [float(line.values[name]) for line in lines if name in line.values]
