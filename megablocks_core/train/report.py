"""The report of a run: one page to read, one picture, one JSON file of its hard metrics.

    megablocks-report RUN... [--price-per-hour 4.2]

writes ``report.html`` (readable alone), ``loss.png`` and ``report.json`` into each run's folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megablocks_core.train.figures import hard_metrics
from megablocks_core.train.folder import read_run
from megablocks_core.train.page import page
from megablocks_core.train.plot import plot_loss


def write_report(path: str | Path, *, price_per_hour: float | None = None) -> Path:
    """Write the report of the run in folder ``path``; return the page's place.

    ``report.json`` has one key for each metric of ``figures.FIGURES`` that the run tells,
    ``absent`` with the reason for each that it does not, and ``layout_distance`` where the
    summary has it.

    Raises:
        ValueError: ``path`` is no run's folder, or a file in it cannot be read.
        ImportError: matplotlib is missing.
    """
    run = read_run(path)
    present, absent = hard_metrics(run, price_per_hour=price_per_hour)
    given = {key: run.summary[key] for key in ("layout_distance",) if key in run.summary}
    picture = run.path / "loss.png"
    plot_loss(run, picture)
    (run.path / "report.json").write_text(
        json.dumps({**present, **given, "absent": absent}, indent=1) + "\n"
    )
    place = run.path / "report.html"
    place.write_text(page(run, present, absent, picture.read_bytes()), encoding="utf-8")
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
    options = parser.parse_args(arguments)
    status = 0
    for run in options.runs:
        try:
            print(write_report(run, price_per_hour=options.price_per_hour))
        except (ImportError, OSError, ValueError) as error:
            print(f"megablocks-report: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
