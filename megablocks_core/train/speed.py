"""How fast a run was over its steps, and where the time of a step went."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from megablocks_core.train.drawing import (
    OTHER,
    PHASES,
    TRAINING,
    draw_smoothed,
    label_ends,
    panels,
    points,
)
from megablocks_core.train.figures import total_of
from megablocks_core.train.folder import Run
from megablocks_core.train.lines import Line
from megablocks_core.train.plot import draw_starts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = 60


def plot_speed(run: Run, target: str | Path | BytesIO) -> None:
    """Write tokens a second, and a step's time as stacked bars, as a picture; both if timed.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that brings it.
    """
    with panels(target, 1.7, 2.2) as (speed, phases):
        if rates := points(run, "tokens_per_second"):
            end = draw_smoothed(speed, rates, TRAINING)
            mean = total_of(run.lines, "tokens_per_second")
            speed.set_ylim(0, 1.15 * max(rate for _, rate in rates))
            label_ends(speed, [(*end, f"mean {mean:,.0f}", TRAINING)])
        speed.set_ylabel("tokens per second")
        speed.yaxis.set_major_formatter("{x:,.0f}")
        _draw_phases(phases, [line for line in run.lines if "step_seconds" in line.values])
        draw_starts([speed, phases], run)


def shares_of_step(lines: Sequence[Line]) -> list[tuple[str, str, float]]:
    """Words, colour and seconds a step of each phase that took any, and of the rest."""
    steps, seconds = total_of(lines, "step_seconds").count, total_of(lines, "step_seconds").sum
    parts = [(words, color, total_of(lines, name).sum / steps) for name, words, color in PHASES]
    rest = max(0.0, seconds / steps - sum(part for _, _, part in parts))
    return [*parts, (*OTHER, rest)]


def _draw_phases(axes: Axes, lines: Sequence[Line]) -> None:
    axes.set_ylabel("milliseconds a step")
    if not lines:
        return
    width = -(-len(lines) // _BARS)
    bins = [lines[first : first + width] for first in range(0, len(lines), width)]
    lefts = [bin[0].step for bin in bins]
    widths = [right - left for left, right in zip(lefts, lefts[1:], strict=False)]
    widths.append(max(1, lines[-1].step - lefts[-1] + 1))
    bottoms = [0.0] * len(bins)
    for place, (words, color, seconds) in enumerate(shares_of_step(lines)):
        if not seconds:
            continue
        heights = [1e3 * shares_of_step(bin)[place][2] for bin in bins]
        axes.bar(lefts, heights, widths, bottoms, align="edge", color=color, label=words)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.legend(ncols=6, loc="lower left", bbox_to_anchor=(-0.01, 1.0), handlelength=0.9)
