"""Shares of a step's time add up, over all steps and over each bar."""

from io import BytesIO
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from megablocks_core.train import Mean
from megablocks_core.train.drawing import OTHER, PHASES
from megablocks_core.train.folder import Run
from megablocks_core.train.lines import Line
from megablocks_core.train.speed import plot_speed, shares_of_step


def lines_of(count, *, steps=1):
    return [
        Line(
            place * steps,
            0.0,
            {
                "tokens_per_second": Mean(100.0 * steps, 0.5 * steps),
                "step_seconds": Mean(0.5 * steps, steps),
                "forward_seconds": Mean((0.1 if place % 2 else 0.2) * steps, steps),
                "backward_seconds": Mean(0.2 * steps, steps),
            },
        )
        for place in range(count)
    ]


def test_shares_are_seconds_a_step_and_the_rest_is_other():
    shares = {words: seconds for words, _, seconds in shares_of_step(lines_of(4, steps=10))}
    assert shares.pop("forward") == pytest.approx(0.15)
    assert shares.pop("backward") == pytest.approx(0.2)
    assert shares.pop("other") == pytest.approx(0.15)
    assert not any(shares.values()) and len(shares) == len(PHASES) - 2
    line = Line(0, 0.0, {"step_seconds": Mean(1.0), "data_seconds": Mean(1.5)})
    assert shares_of_step([line])[-1] == (*OTHER, 0.0)


@pytest.mark.parametrize("count", [1, 7, 200])
def test_bars_are_as_high_as_a_step_is_long(count, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_speed(Run(Path("run"), lines_of(count, steps=2), [], {}), BytesIO())
    speed, phases = drawn[0].axes
    tops = {}
    for bar in phases.patches:
        tops[bar.get_x()] = tops.get(bar.get_x(), 0.0) + bar.get_height()
    assert list(tops.values()) == pytest.approx([500.0] * len(tops)) and len(tops) <= 60
    assert sum(bar.get_width() for bar in phases.patches) > 0
    assert [text.get_text() for text in speed.texts] == ["mean 200"]
    assert [text.get_text() for text in phases.get_legend().texts] == [
        "forward",
        "backward",
        "other",
    ]
