"""What all pictures of a report share: their look, and panels one above the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megablocks_core.train.folder import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that readers with any kind of colour vision tell apart (Okabe and Ito).
TRAINING, VALIDATION, QUIET, INK, NOTE = "#0072b2", "#d55e00", "#8a8f98", "#22262c", "#5b616b"
SERIES = (TRAINING, VALIDATION, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)

# What a step's time is shown as: metric, words, colour.
PHASES = (
    ("data_seconds", "data", "#e69f00"),
    ("forward_seconds", "forward", "#56b4e9"),
    ("backward_seconds", "backward", "#0072b2"),
    ("reduction_seconds", "gradient reduction", "#cc79a7"),
    ("optimizer_seconds", "optimizer", "#009e73"),
)
OTHER = ("other", "#c4c8ce")

_LABEL = 0.2  # inches that a label needs

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.0,
    "ytick.minor.width": 0.0,
}


@contextmanager
def panels(target: str | Path | BytesIO, *heights: float) -> Iterator[list[Axes]]:
    """Axes of these heights (inches) over one axis of steps; written to ``target`` at the end.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that brings it.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'megablocks-core[report]'") from error

    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(8.6, sum(heights) + 0.3 * len(heights) + 0.4), layout="constrained"
        )
        FigureCanvasAgg(figure)
        rows = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, height_ratios=list(heights)
        )
        axes = [row[0] for row in rows]
        yield axes
        for each in axes:
            each.margins(x=0.01, y=0.12)
        axes[-1].set_xlabel("step")
        figure.align_ylabels(axes)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr]
        figure.savefig(target, dpi=200, facecolor="white", format="png")


def points(run: Run, name: str) -> list[tuple[int, float]]:
    """Step and value of each line that has metric ``name``."""
    return [(line.step, float(line.values[name])) for line in run.lines if name in line.values]


def choose_scale(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis where values are positive and span more than a factor of thirty."""
    known = [value for value in values if math.isfinite(value)]
    if known and min(known) > 0 and max(known) > 30 * min(known):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")


def draw_smoothed(
    axes: Axes, series: Sequence[tuple[int, float]], color: str, *, label: str | None = None
) -> tuple[int, float]:
    """Draw values pale and their running mean strong; return the mean's last point."""
    steps, values = zip(*series, strict=True)
    smooth = running_mean(values, len(values) // 40)
    if smooth != list(values):
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    marker = "o" if len(values) <= 20 else ""
    axes.plot(steps, smooth, color=color, linewidth=1.6, marker=marker, markersize=3.5, label=label)
    return steps[-1], smooth[-1]


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and up to ``reach`` on either side, fewer near the ends, evenly.

    Values that are not finite stay, and count in no mean.
    """
    result = []
    for place, value in enumerate(values):
        near = min(reach, place, len(values) - 1 - place)
        window = [v for v in values[place - near : place + near + 1] if math.isfinite(v)]
        result.append(math.fsum(window) / len(window) if math.isfinite(value) else value)
    return result


def column_edges(steps: Sequence[int]) -> list[float]:
    """Where the columns of ``steps`` begin and end: half-way between neighbours."""
    middles = [(left + right) / 2 for left, right in zip(steps, steps[1:], strict=False)]
    first = steps[0] - (middles[0] - steps[0] if middles else 0.5)
    last = steps[-1] + (steps[-1] - middles[-1] if middles else 0.5)
    return [first, *middles, last]


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Name each curve at its end (x, y, words, colour), moved apart where the ends lie close."""
    bounds = axes.get_ylim()
    is_log = axes.get_yscale() == "log"
    low, high = (math.log(bound) if is_log else bound for bound in bounds)
    height = axes.bbox.height / axes.figure.dpi  # inches
    apart, placed = _LABEL / height * (high - low), -math.inf
    for x, y, words, color in sorted(ends, key=lambda end: end[1]):
        if not math.isfinite(y):
            continue
        placed = max(math.log(y) if is_log else y, placed + apart)
        axes.annotate(
            words,
            (x, math.exp(placed) if is_log else placed),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontweight="bold",
            annotation_clip=False,
        )
