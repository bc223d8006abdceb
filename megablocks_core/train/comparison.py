"""One page that lays runs side by side: their curves, figures, and what their records differ in."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from io import BytesIO
from itertools import cycle
from typing import Any

from megablocks_core.train.drawing import SERIES, choose_scale, draw_smoothed, label_ends, panels
from megablocks_core.train.drawing import points as points_of
from megablocks_core.train.figures import FIGURES, hard_metrics, total_of
from megablocks_core.train.folder import Run
from megablocks_core.train.page import document, image, shown, step_bar, table
from megablocks_core.train.speed import shares_of_step

# What differs between any two starts, and says nothing.
_BESIDE_THE_POINT = (
    "started",
    "ended",
    "recovery_seconds",
    "repeated_steps",
    "after_the_last_line",
    "label",
    "step",
)
_ABSENT = '<span class="quiet">&ndash;</span>'


def comparison(runs: Iterable[Run], *, price_per_hour: float | None = None) -> str:
    """The page that compares ``runs``; differences are from the first.

    Raises:
        ImportError: matplotlib is missing.
    """
    named = named_runs(list(runs))
    title = " and ".join(named) if len(named) == 2 else f"{len(named)} runs"
    steps = ", ".join(f"{escape(n)}: {run.lines[-1].step + 1:,} steps" for n, run in named.items())
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{steps}.</p>',
        image(_curves(named), "Losses of the runs over one another"),
        "<h2>Key figures</h2>",
        _figures(named, price_per_hour),
        _step_times(named),
        "<h2>What the records differ in</h2>",
        _records(named),
    ]
    return document(title, parts)


def named_runs(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by the names of their folders; by their paths where these are not different."""
    names = [run.path.resolve().name for run in runs]
    paths = [str(run.path) for run in runs]
    return dict(zip(names if len(set(names)) == len(names) else paths, runs, strict=True))


def differences(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dotted key to the value in each record (``None``: has none), where values differ."""
    flat = [dict(_leaves(record)) for record in records]
    keys = dict.fromkeys(key for record in flat for key in record)
    rows = {key: [record.get(key) for record in flat] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def _curves(named: Mapping[str, Run]) -> bytes:
    colors = dict(zip(named, cycle(SERIES), strict=False))
    losses = {name: points_of(run, "loss") for name, run in named.items()}
    held_out = {name: points_of(run, "validation_loss") for name, run in named.items()}
    rates = {name: points_of(run, "tokens_per_second") for name, run in named.items()}
    target = BytesIO()
    heights = [3.4, *[1.7] * any(held_out.values()), *[1.4] * any(rates.values())]
    with panels(target, *heights) as axes:
        wanted = [(losses, "loss (nats per token)", ".2f")]
        wanted += [(held_out, "validation loss", ".2f")] * any(held_out.values())
        wanted += [(rates, "tokens per second", ",.0f")] * any(rates.values())
        for each, (curves, words, form) in zip(axes, wanted, strict=True):
            choose_scale(each, [value for curve in curves.values() for _, value in curve])
            ends = [
                (*draw_smoothed(each, curves[name], color, label=name), color)
                for name, color in colors.items()
                if curves[name]
            ]
            right = max((x for x, _, _ in ends), default=0)
            label_ends(each, [(right, y, f"{y:{form}}", color) for _, y, color in ends])
            each.set_ylabel(words)
        axes[-1].yaxis.set_major_formatter("{x:,g}")
        axes[0].legend(ncols=4, loc="lower left", bbox_to_anchor=(-0.01, 1.0), handlelength=1.2)
    return target.getvalue()


def _figures(named: Mapping[str, Run], price_per_hour: float | None) -> str:
    found = [hard_metrics(run, price_per_hour=price_per_hour)[0] for run in named.values()]
    rows = []
    for figure in (figure for theme in FIGURES.values() for figure in theme):
        values = [metrics.get(figure.key) for metrics in found]
        if any(value is not None for value in values):
            cells = [_cell(value, values[0], figure.unit) for value in values]
            rows.append((f"<code>{figure.key}</code>", *cells))
    return table(("", *map(escape, named)), rows)


def _cell(value: float | None, first: float | None, unit: str) -> str:
    if value is None:
        return _ABSENT
    text = f"<b>{shown(value, unit)}</b>"
    if unit and first and value != first and math.isfinite(value / first):
        text += f' <span class="quiet">{100 * (value / first - 1):+.1f} %</span>'
    return text


def _step_times(named: Mapping[str, Run]) -> str:
    parts = []
    for name, run in named.items():
        if total_of(run.lines, "step_seconds").sum:
            shares = [part for part in shares_of_step(run.lines) if part[2] > 0]
            parts.append(f"<p>{escape(name)}</p>{step_bar(shares)}")
    return "\n".join(["<h2>Where a step's time goes</h2>", *parts]) if parts else ""


def _records(named: Mapping[str, Run]) -> str:
    records = [run.starts[-1] if run.starts else {} for run in named.values()]
    told = [
        {key: value for key, value in record.items() if key not in _BESIDE_THE_POINT}
        for record in records
    ]
    rows = [
        (f"<code>{escape(key)}</code>", *(_word(value) for value in values))
        for key, values in differences(told).items()
    ]
    if not rows:
        return '<p class="quiet">Nothing: from versions to command line they agree.</p>'
    return table(("", *map(escape, named)), rows)


def _word(value: Any) -> str:
    return (
        _ABSENT if value is None else escape(value if isinstance(value, str) else json.dumps(value))
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
