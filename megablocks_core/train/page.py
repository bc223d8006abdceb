"""The page of a report: HTML that stands alone, with its picture inside."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, NamedTuple

from megablocks_core.train.figures import FIGURES, set_name, total_of, validation_sets
from megablocks_core.train.folder import Run, ended_well
from megablocks_core.train.speed import shares_of_step

_CSS = """
:root { color: #22262c; background: #fff; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 860px; margin: 3rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; letter-spacing: -0.015em; }
h2 { font-size: 1.05rem; margin: 2.6rem 0 .7rem; }
p { margin: .4rem 0; }
.lead { font-size: 1.1rem; color: #4b515a; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1rem; margin: 1.8rem 0; }
.tiles div { border-top: 2px solid #22262c; padding-top: .5rem; }
.tiles b { display: block; font-size: 1.5rem; font-weight: 600; letter-spacing: -0.01em; }
.tiles span { color: #5b616b; font-size: .87rem; }
img { width: 100%; display: block; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0;
  border-bottom: 1px solid #e6e8eb; font-weight: 400; }
thead th { color: #5b616b; font-size: .87rem; }
tbody th.theme { color: #5b616b; font-size: .87rem; padding-top: 1rem; }
td.value { white-space: nowrap; font-weight: 600; }
.quiet { color: #5b616b; }
.bar { display: flex; height: 1.6rem; gap: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; margin-top: .5rem; font-size: .9rem; }
.legend i { display: inline-block; width: .7rem; height: .7rem; margin-right: .4rem; }
code, pre { font: .85rem/1.5 ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f7f8; padding: .9rem 1rem; }
summary { cursor: pointer; }
@media (max-width: 600px) { .tiles { grid-template-columns: repeat(2, 1fr); } }
@media print {
  :root { font-size: 12px; }
  body { max-width: none; margin: 0; }
  h2 { break-after: avoid; }
  img, tr, .tiles, .bar { break-inside: avoid; }
  .bar, .legend i { print-color-adjust: exact; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""


class Pictures(NamedTuple):
    """Pictures of a run, as PNG; ``None`` where it has nothing to show."""

    losses: bytes
    speed: bytes | None = None
    layers: bytes | None = None
    experts: bytes | None = None


def page(
    run: Run, present: Mapping[str, float], absent: Mapping[str, str], pictures: Pictures
) -> str:
    """The report of ``run`` with its hard metrics and the reasons for absent ones."""
    name = run.path.resolve().name
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="lead">{_lead(run, present)}</p>',
        _tiles(present),
        image(pictures.losses, "Loss over steps"),
        _step_time(run),
        image(pictures.speed, "Tokens a second, and phases of a step, over steps"),
        _figures(present, absent),
        _validation(run),
        "" if pictures.layers is None else "<h2>Layers</h2>",
        image(pictures.layers, "Gradient norm and output of each layer over steps"),
        "" if pictures.experts is None else "<h2>Experts</h2>",
        image(pictures.experts, "Load of each expert over steps"),
        _distance(run.summary.get("layout_distance")),
        _sample(run.summary.get("sample")),
        _starts(run),
        _record(run),
    ]
    return document(name, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A page of its own that holds the ``parts``, which are HTML."""
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n"
        f'<meta name="viewport" content="width=device-width">\n<style>{_CSS}</style>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def image(png: bytes | None, words: str) -> str:
    """A picture inside the page; nothing for ``None``."""
    if png is None:
        return ""
    encoded = base64.b64encode(png).decode()
    return f'<img src="data:image/png;base64,{encoded}" alt="{words}">'


def shown(value: float, unit: str) -> str:
    """``value`` with its unit, for people: three digits or so."""
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit in ("B", "B/s"):
        return _scaled(value, unit)
    if unit == "1/s":
        return f"{value:,.0f} /s"
    if unit == "s":
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    if unit == "":
        return f"{value:,.0f}"
    if unit == "price":
        return f"{value:.3g}"
    return f"{value:.4f}" if unit == "nats" else f"{value:.3f}"


def _lead(run: Run, present: Mapping[str, float]) -> str:
    tokens = total_of(run.lines, "tokens_per_second").sum
    words = [f"{run.lines[-1].step + 1:,} steps"]
    if tokens:
        words.append(f"{tokens:,.0f} tokens")
    if len(run.starts) > 1:
        words.append(f"{len(run.starts)} starts")
    losses = [line.values["loss"] for line in run.lines if "loss" in line.values]
    sentence = ", ".join(words) + "."
    if losses:
        sentence += f" Training loss {losses[0]:.2f} at first, {losses[-1]:.2f} at the end"
        if "validation_loss" in present:
            sentence += f"; validation loss {present['validation_loss']:.2f}"
        sentence += "."
    return sentence


def _tiles(present: Mapping[str, float]) -> str:
    tiles = (
        ("tokens_per_second", "1/s", "tokens"),
        ("step_seconds", "s", "a step"),
        ("mfu", "share", "of peak arithmetic (MFU)"),
        ("communication_wait_share", "share", "waiting for other ranks"),
    )
    cells = [
        f"<div><b>{shown(present[key], unit) if key in present else '&ndash;'}</b>"
        f"<span>{words}</span></div>"
        for key, unit, words in tiles
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _step_time(run: Run) -> str:
    step = total_of(run.lines, "step_seconds")
    if not step.sum:
        return ""
    parts = [part for part in shares_of_step(run.lines) if part[2] >= 0.0005 * step]
    return "<h2>Where a step's time goes</h2>\n" + step_bar(parts)


def step_bar(parts: Sequence[tuple[str, str, float]]) -> str:
    """A bar of parts (words, colour, seconds), and what they mean."""
    whole = math.fsum(seconds for _, _, seconds in parts)
    bar = [
        f'<div style="flex:{seconds / whole:.4f};background:{color}"></div>'
        for _, color, seconds in parts
    ]
    legend = [
        f'<span><i style="background:{color}"></i>{words} '
        f"{_milliseconds(seconds)}, {100 * seconds / whole:.1f} %</span>"
        for words, color, seconds in parts
    ]
    return f'<div class="bar">{"".join(bar)}</div>\n<div class="legend">{"".join(legend)}</div>'


def _figures(present: Mapping[str, float], absent: Mapping[str, str]) -> str:
    rows: list[str] = []
    for theme, figures in FIGURES.items():
        rows.append(f'<tr><th class="theme" colspan="3">{theme}</th></tr>')
        for figure in figures:
            name = f"<td><code>{figure.key}</code></td>"
            if figure.key in present:
                value = shown(present[figure.key], figure.unit)
                rest = f'<td class="value">{value}</td><td class="quiet">{figure.meaning}</td>'
            else:
                reason = escape(absent[figure.key])
                rest = f'<td class="quiet">absent</td><td class="quiet">{reason}</td>'
            rows.append(f"<tr>{name}{rest}</tr>")
    return f"<h2>Hard metrics</h2>\n<table><tbody>{''.join(rows)}</tbody></table>"


def _validation(run: Run) -> str:
    """The last loss of each validation set, where there are several."""
    names = validation_sets(run.lines)
    if names in ([], ["validation_loss"]):
        return ""
    rows = []
    for name in names:
        step, mean = next(
            (line.step, line.values[name]) for line in reversed(run.lines) if name in line.values
        )
        rows.append((escape(set_name(name)), f"{float(mean):.4f}", f"{step:,}"))
    return "<h2>Validation sets</h2>\n" + table(("set", "loss (nats)", "at step"), rows)


def _distance(distance: object) -> str:
    if distance is None:
        return ""
    distances = distance if isinstance(distance, dict) else {"largest": distance}
    cells = [
        (escape(str(what)), f"{value:.2e}" if isinstance(value, float) else escape(str(value)))
        for what, value in distances.items()
    ]
    return "<h2>Distance between layouts</h2>\n" + table(("compared", "distance"), cells)


def _sample(sample: object) -> str:
    return "" if sample is None else f"<h2>What it writes</h2>\n<pre>{escape(str(sample))}</pre>"


def _starts(run: Run) -> str:
    if not run.starts:
        return ""
    rows = [
        (
            str(number),
            escape(start.get("label") or ""),
            str(start["step"]),
            datetime.fromtimestamp(start["started"], UTC).strftime("%Y-%m-%d %H:%M:%S"),
            _fate(start, is_last=start is run.starts[-1]),
            "" if start["recovery_seconds"] is None else shown(start["recovery_seconds"], "s"),
            f"{start['repeated_steps']:,}" if start.get("repeated_steps") else "",
        )
        for number, start in enumerate(run.starts, start=1)
    ]
    head = ("start", "", "from step", "began (UTC)", "ended", "recovered in", "steps again")
    return "<h2>Starts</h2>\n" + table(head, rows)


def _fate(start: Mapping[str, Any], *, is_last: bool) -> str:
    if ended_well(start):
        return f"well, after {shown(start['ended'] - start['started'], 's')}"
    return escape(start["error"] or ("not yet, or killed" if is_last else "killed"))


def _record(run: Run) -> str:
    if not run.starts:
        return ""
    text = escape(json.dumps(run.starts[-1], indent=1))
    return (
        f"<h2>Run record</h2>\n<details><summary>Versions, commit, hardware, mesh, data, spec "
        f"and command line of the last start</summary><pre>{text}</pre></details>"
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _milliseconds(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.3g} ms" if milliseconds < 999.5 else f"{milliseconds:,.0f} ms"


def _scaled(number: float, unit: str) -> str:
    """Three digits and a decimal prefix: ``3.28 MB``."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"
