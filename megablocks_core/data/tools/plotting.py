"""Pictures of a dataset's lengths, and of a recipe's mixture and epochs over its steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from megablocks_core.data.packages import package
from megablocks_core.data.tools.documents import open_dataset
from megablocks_core.data.tools.inspecting import Bin, Lengths, lengths_of
from megablocks_core.data.tools.mixing import curves
from megablocks_core.data.tools.recipe import Recipe
from megablocks_core.files import replace_file
from megablocks_core.files.commands import printable

# Colours that readers with any kind of colour vision tell apart (Okabe and Ito).
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#22262c")
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e8eb",
    "legend.frameon": False,
    "svg.hashsalt": "megablocks_core",  # the same picture is the same file
}


def plot_lengths(prefixes: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Draw how long the documents are, in bins of powers of two, and where the tokens are.

    One panel a dataset: the share of its documents and of its tokens in each bin.

    Raises:
        ValueError: A dataset has no document.
        ModuleNotFoundError: matplotlib is missing; the extra is named.
    """
    found: list[tuple[str, Lengths]] = []
    for prefix in prefixes:
        dataset = open_dataset(prefix)
        lengths = lengths_of(dataset)
        if lengths is None:
            raise ValueError(f"{dataset.prefix}: has no documents, must have some to be drawn")
        found.append((dataset.prefix, lengths))
    with _panels(out, [2.4] * len(found)) as axes:
        for each, (prefix, lengths) in zip(axes, found, strict=True):
            _draw_bins(each, lengths.histogram)
            # A dollar would begin a formula.
            each.set_title(printable(os.path.basename(prefix)).replace("$", r"\$"), fontsize=9)
        axes[-1].set_xlabel("tokens of a document, from this many on")


def plot_recipe(recipe: Recipe, out: str | os.PathLike[str]) -> None:
    """Draw each source's share of the samples, and its epochs, over the steps.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the extra is named.
    """
    found = curves(recipe)
    with _panels(out, [2.4, 2.4], shared=True) as (mixture, epochs):
        for number, name in enumerate(found.epochs):
            colour, label = SERIES[number % len(SERIES)], printable(name).replace("$", r"\$")
            style = ("-", "--", ":")[number // len(SERIES) % 3]
            look = {"color": colour, "linestyle": style, "label": label}
            mixture.stairs(found.shares[name], found.steps, baseline=None, **look)
            epochs.plot(found.steps, found.epochs[name], **look)
        mixture.set_ylabel("share of samples")
        mixture.set_ylim(0, 1)
        mixture.legend(loc="upper left", bbox_to_anchor=(1, 1))
        epochs.set_ylabel("epochs")
        epochs.set_xlabel("step")


def _draw_bins(axes: Any, histogram: list[Bin]) -> None:
    documents = sum(one.documents for one in histogram)
    tokens = max(1, sum(one.tokens for one in histogram))
    places = range(len(histogram))
    shares = [one.documents / documents for one in histogram]
    axes.bar([p - 0.2 for p in places], shares, 0.4, color=SERIES[0], label="documents")
    shares = [one.tokens / tokens for one in histogram]
    axes.bar([p + 0.2 for p in places], shares, 0.4, color=SERIES[1], label="tokens")
    axes.set_xticks(list(places), [_short(one.least) for one in histogram])
    axes.set_ylabel("share")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _short(number: int) -> str:
    for power, unit in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if number >= 1 << power:
            return f"{number >> power} {unit}"
    return str(number)


@contextmanager
def _panels(
    out: str | os.PathLike[str], heights: list[float], *, shared: bool = False
) -> Iterator[list[Any]]:
    """Axes one above the other; written to ``out``, whole or not at all, at the end."""
    if Path(out).suffix != ".svg":
        raise ValueError(f"out={os.fspath(out)!r} must end in .svg")
    matplotlib = package("matplotlib", what="a picture", extra="report")
    figures = package("matplotlib.figure", what="a picture", extra="report")
    with matplotlib.rc_context(_STYLE):
        figure = figures.Figure(figsize=(8.6, sum(heights) + 0.4), layout="constrained")
        rows = figure.subplots(len(heights), 1, sharex=shared, squeeze=False)
        yield [row[0] for row in rows]
        picture = BytesIO()
        figure.savefig(picture, format="svg", facecolor="white", metadata={"Date": None})
    replace_file(Path(out), picture.getvalue())
