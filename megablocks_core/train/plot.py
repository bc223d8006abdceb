"""The curves of a run over its steps: losses, gradient norm and learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megablocks_core.train.drawing import (
    NOTE,
    QUIET,
    SERIES,
    TRAINING,
    VALIDATION,
    choose_scale,
    draw_smoothed,
    label_ends,
    panels,
    points,
)
from megablocks_core.train.figures import (
    anomalies,
    lines_of_starts,
    set_name,
    validation_sets,
)
from megablocks_core.train.folder import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Transform


def plot_loss(run: Run, target: str | Path | BytesIO) -> None:
    """Write the losses of ``run`` as a picture, with what else it tells beneath.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that brings it.
    """
    norms, rates = points(run, "grad_norm"), points(run, "learning_rate")
    heights = [3.4, *[1.1] * bool(norms), *[0.8] * bool(rates)]
    with panels(target, *heights) as (losses, *others):
        _draw_losses(losses, run)
        if norms:
            _draw_norms(others[0], norms)
        if rates:
            _draw_rates(others[-1], rates)
        draw_starts([losses, *others], run)


def draw_starts(axes: Sequence[Axes], run: Run) -> None:
    """The label of each start that left lines; a dashed line where one went on from another."""
    kept = [start for start, lines in zip(run.starts, lines_of_starts(run), strict=True) if lines]
    for number, start in enumerate(kept):
        if number:
            for each in axes:
                each.axvline(start["step"], color=QUIET, linewidth=0.8, linestyle=(0, (3, 3)))
        words = start.get("label") or (f"start {number + 1}" if number else "")
        axes[0].annotate(
            words if not number else f"resumed: {words}",
            (start["step"], 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=8,
            color=NOTE,
        )


def _draw_losses(axes: Axes, run: Run) -> None:
    ends: list[tuple[float, float, str, str]] = []
    training = points(run, "loss")
    validation = {set_name(name): points(run, name) for name in validation_sets(run.lines)}
    choose_scale(axes, [loss for _, loss in chain(training, *validation.values())])
    if training:
        step, loss = draw_smoothed(axes, training, TRAINING)
        ends.append((step, loss, f"training {loss:.2f}", TRAINING))
        _mark_anomalies(axes, training)
        _mark_skipped(axes, run)
    for (name, series), color in zip(validation.items(), cycle(SERIES[1:])):
        steps, losses = zip(*series, strict=True)
        axes.plot(steps, losses, color=color, linewidth=1.2, marker="o", markersize=3.5)
        ends.append((steps[-1], losses[-1], f"{name} {losses[-1]:.2f}", color))
    axes.set_ylabel("loss (nats per token)")
    label_ends(axes, ends)


def _draw_norms(axes: Axes, norms: Sequence[tuple[int, float]]) -> None:
    choose_scale(axes, [norm for _, norm in norms])
    axes.plot(*zip(*norms, strict=True), color=QUIET, linewidth=0.9)
    _mark_anomalies(axes, norms)
    axes.set_ylabel("gradient norm")


def _draw_rates(axes: Axes, rates: Sequence[tuple[int, float]]) -> None:
    axes.plot(*zip(*rates, strict=True), color=QUIET, linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.set_ylabel("learning rate")


def _mark_anomalies(axes: Axes, series: Sequence[tuple[int, float]]) -> None:
    """A ring around each value that stands out, a cross below each that is not finite."""
    odd = [series[place] for place in anomalies([value for _, value in series])]
    high = [(step, value) for step, value in odd if math.isfinite(value)]
    lost = [step for step, value in odd if not math.isfinite(value)]
    unlined: dict[str, Any] = {"linestyle": "none", "color": VALIDATION, "markerfacecolor": "none"}
    below = axes.get_xaxis_transform()
    if high:
        axes.plot(*zip(*high, strict=True), marker="o", markersize=6, **unlined)
        words = "anomaly" if len(high) == 1 else f"{len(high)} anomalies"
        _note(axes, words, high[0], axes.transData)
    if lost:
        axes.plot(lost, [0.1] * len(lost), marker="x", transform=below, **unlined)
        _note(axes, "not finite", (lost[0], 0.1), below)


def _mark_skipped(axes: Axes, run: Run) -> None:
    """A triangle at the foot of each line whose step, or one of whose steps, a guard skipped."""
    steps = [step for step, share in points(run, "skipped") if share > 0]
    if steps:
        below = axes.get_xaxis_transform()
        axes.plot(
            steps, [0.04] * len(steps), "^", color=NOTE, markersize=5, transform=below, zorder=3
        )
        _note(axes, "skipped", (steps[0], 0.04), below)


def _note(axes: Axes, words: str, place: tuple[float, float], coordinates: Transform) -> None:
    axes.annotate(
        words,
        place,
        xycoords=coordinates,
        xytext=(7, -3),
        textcoords="offset points",
        fontsize=8,
        color=VALIDATION,
    )
