"""Maps of layers over steps, from what ``watch`` saw."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from megablocks_core.train.drawing import column_edges, panels
from megablocks_core.train.folder import Run

_MAPS = {"gradient.norm": "gradient norm", "activation.rms": "output, root mean square"}

Rows = Mapping[str, Mapping[int, float]]


def plot_layers(run: Run, target: str | Path | BytesIO) -> bool:
    """Write maps of gradients and outputs as a picture; ``False`` if ``run`` watched neither.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that brings it.
    """
    found = {words: layer_rows(run, key) for key, words in _MAPS.items()}
    maps = {words: rows for words, rows in found.items() if rows}
    if not maps:
        return False
    heights = [0.4 + 0.17 * len(rows) for rows in maps.values()]
    with panels(target, *heights) as axes:
        for each, (words, rows) in zip(axes, maps.items(), strict=True):
            steps = sorted({step for row in rows.values() for step in row})
            colors = [[_logarithm(row.get(step)) for step in steps] for row in rows.values()]
            image = each.pcolormesh(
                column_edges(steps), range(len(rows) + 1), colors, cmap="cividis", rasterized=True
            )
            each.set_yticks([place + 0.5 for place in range(len(rows))], list(rows), fontsize=7)
            each.invert_yaxis()
            each.grid(False)
            each.set_title(words, loc="left", fontsize=9)
            bar = each.figure.colorbar(image, ax=each, pad=0.01, aspect=30)
            bar.ax.yaxis.set_major_formatter(lambda exponent, _: f"{10**exponent:.2g}")
            bar.outline.set_visible(False)  # type: ignore[operator]
    return True


def layer_rows(run: Run, key: str) -> Rows:
    """Layer to step to value of the metrics ``key/name``; norms of one layer's parts combined.

    A layer is a name up to its first number ("model.layers.3"), or else without its last word.
    """
    rows: dict[str, dict[int, float]] = defaultdict(dict)
    for line in run.lines:
        for metric, value in line.values.items():
            kind, _, name = metric.partition("/")
            if kind != key:
                continue
            layer = _layer_of(name, is_parameter=kind.startswith("gradient"))
            if kind.startswith("gradient"):
                rows[layer][line.step] = math.hypot(rows[layer].get(line.step, 0.0), value)
            elif layer == name:
                rows[layer][line.step] = float(value)
    return rows


def _layer_of(name: str, *, is_parameter: bool) -> str:
    words = name.split(".")
    for place, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: place + 1])
    return ".".join(words[:-1]) if is_parameter and len(words) > 1 else name


def _logarithm(value: float | None) -> float:
    return math.log10(value) if value and math.isfinite(value) else math.nan
