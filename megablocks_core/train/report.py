"""The report of a run: one page to read, one picture, one JSON file of its hard metrics.

    megablocks-report RUN... [--price-per-hour 4.2] [--comparison comparison.html]

writes ``report.html`` (readable alone), ``loss.png`` and ``report.json`` into each run's folder.
Of several runs it also writes one page that compares them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from megablocks_core.files.commands import say
from megablocks_core.train.comparison import comparison
from megablocks_core.train.expert_load import plot_expert_load
from megablocks_core.train.figures import hard_metrics
from megablocks_core.train.folder import Run, read_run
from megablocks_core.train.layers import plot_layers
from megablocks_core.train.lines import finite
from megablocks_core.train.page import Pictures, page
from megablocks_core.train.plot import plot_loss
from megablocks_core.train.record import PARTS, missing_from
from megablocks_core.train.speed import plot_speed


def write_report(path: str | Path, *, price_per_hour: float | None = None) -> Path:
    """Write the report of the run in folder ``path``; return the page's place.

    ``report.json`` has one key for each metric of ``figures.FIGURES`` that the run tells, and
    one for each part of its last start's record (``versions``, ``commit``, ``hardware``,
    ``mesh``, ``data``, ``tokenizer``, ``spec``, ``command_line``); ``absent`` with the reason
    for each that it does not; and ``layout_distance`` where the summary has it.

    Raises:
        ValueError: ``path`` is no run's folder, or a file in it cannot be read.
        ImportError: matplotlib is missing.
    """
    run = read_run(path)
    present, absent = hard_metrics(run, price_per_hour=price_per_hour)
    pictures = _pictures(run)
    (run.path / "loss.png").write_bytes(pictures.losses)
    report = {**present, **_record(run, absent), "absent": absent}
    (run.path / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    place = run.path / "report.html"
    place.write_text(page(run, present, absent, pictures), encoding="utf-8")
    return place


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``megablocks-report``; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="megablocks-report",
        description="Write report.html, loss.png and report.json into the folder of each run.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that a RunFolder wrote")
    parser.add_argument(
        "--price-per-hour",
        type=float,
        metavar="PRICE",
        help="price of all machines together, in any currency",
    )
    parser.add_argument(
        "--comparison",
        type=Path,
        default=Path("comparison.html"),
        metavar="PAGE",
        help="where to write the page that compares several runs (%(default)s)",
    )
    options = parser.parse_args(arguments)
    status, good = 0, []
    for run in options.runs:
        try:
            print(write_report(run, price_per_hour=options.price_per_hour))
            good.append(run)
        except (ImportError, OSError, ValueError) as error:
            say("megablocks-report", str(error))
            status = 1
    if len(good) > 1:
        try:
            text = comparison(map(read_run, good), price_per_hour=options.price_per_hour)
            options.comparison.write_text(text, encoding="utf-8")
            print(options.comparison)
        except OSError as error:
            say("megablocks-report", str(error))
            status = 1
    return status


def _pictures(run: Run) -> Pictures:
    losses, speed, layers, experts = (BytesIO() for _ in range(4))
    plot_loss(run, losses)
    timed = any("step_seconds" in line.values for line in run.lines)
    if timed:
        plot_speed(run, speed)
    watched = plot_layers(run, layers)
    return Pictures(
        losses.getvalue(),
        speed.getvalue() if timed else None,
        layers.getvalue() if watched else None,
        experts.getvalue() if plot_expert_load(run, experts) else None,
    )


def _record(run: Run, absent: dict[str, str]) -> dict[str, Any]:
    """What the last start's record and the summary tell; reasons for the rest go to ``absent``."""
    record = run.starts[-1] if run.starts else {}
    missing = missing_from(record)
    absent.update(missing)
    found = {key: record[key] for key in PARTS if key not in missing}
    if "layout_distance" in run.summary:
        found["layout_distance"] = run.summary["layout_distance"]
    return finite(found)


if __name__ == "__main__":
    sys.exit(main())
