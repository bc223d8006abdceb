"""The picture of a run: losses over steps, and the gradient norm beneath, where there is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megablocks_core.train.figures import anomalies, lines_of_starts
from megablocks_core.train.folder import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Blue and vermilion are told apart by readers with any kind of colour vision (Okabe and Ito).
TRAINING, VALIDATION, QUIET, INK = "#0072b2", "#d55e00", "#8a8f98", "#22262c"
_STYLE: Any = {
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
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.0,
}


def plot_loss(run: Run, path: str | Path) -> None:
    """Write the losses of ``run`` as a picture to ``path``.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that brings it.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'megablocks-core[report]'") from error

    with matplotlib.rc_context(_STYLE):
        norms = _points(run, "grad_norm")
        figure = Figure(figsize=(8.6, 5.4 if norms else 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        rows = figure.subplots(
            2 if norms else 1,
            1,
            sharex=True,
            squeeze=False,
            height_ratios=[3, 1][: 1 + bool(norms)],
        )
        axes: list[Axes] = [row[0] for row in rows]
        _draw_losses(axes[0], run)
        if norms:
            _draw_norms(axes[1], norms)
        _draw_starts(axes, run)
        for each in axes:
            each.margins(x=0.01, y=0.12)
        axes[-1].set_xlabel("step")
        figure.align_ylabels(axes)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr]
        figure.savefig(path, dpi=200, facecolor="white")


def _draw_losses(axes: Axes, run: Run) -> None:
    ends: list[tuple[float, float, str, str]] = []
    training, validation = _points(run, "loss"), _points(run, "validation_loss")
    if training:
        steps, losses = zip(*training, strict=True)
        smooth = _running_mean(losses, len(losses) // 40)
        if smooth != list(losses):
            axes.plot(steps, losses, color=TRAINING, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth, color=TRAINING, linewidth=1.6)
        ends.append((steps[-1], smooth[-1], "training", TRAINING))
    if validation:
        steps, losses = zip(*validation, strict=True)
        axes.plot(steps, losses, color=VALIDATION, linewidth=1.2, marker="o", markersize=3.5)
        ends.append((steps[-1], losses[-1], "validation", VALIDATION))
    axes.set_ylabel("loss (nats per token)")
    _label_ends(axes, ends)


def _draw_norms(axes: Axes, norms: Sequence[tuple[int, float]]) -> None:
    steps, values = zip(*norms, strict=True)
    axes.plot(steps, values, color=QUIET, linewidth=0.9)
    odd = [place for place in anomalies(values) if math.isfinite(values[place])]
    axes.plot(
        [steps[place] for place in odd],
        [values[place] for place in odd],
        linestyle="none",
        marker="o",
        markersize=6,
        markerfacecolor="none",
        markeredgecolor=VALIDATION,
    )
    for place in odd:
        axes.annotate(
            "anomaly",
            (steps[place], values[place]),
            xytext=(7, -3),
            textcoords="offset points",
            fontsize=8,
            color=VALIDATION,
        )
    axes.set_ylabel("gradient norm")


def _draw_starts(axes: Sequence[Axes], run: Run) -> None:
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
            color="#5b616b",
        )


def _label_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Name each curve at its end, moved apart where the ends lie close."""
    low, high = axes.get_ylim()
    apart = 0.055 * (high - low)
    placed = -math.inf
    for x, y, name, color in sorted(ends, key=lambda end: end[1]):
        placed = max(y, placed + apart)
        axes.annotate(
            f"{name} {y:.2f}",
            (x, placed),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontweight="bold",
            annotation_clip=False,
        )


def _points(run: Run, name: str) -> list[tuple[int, float]]:
    return [(line.step, float(line.values[name])) for line in run.lines if name in line.values]


def _running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and up to ``reach`` on either side, fewer near the ends, evenly."""
    result = []
    for place in range(len(values)):
        near = min(reach, place, len(values) - 1 - place)
        window = values[place - near : place + near + 1]
        result.append(math.fsum(window) / len(window))
    return result
