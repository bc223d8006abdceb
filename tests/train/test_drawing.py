"""Scales and smoothing show what was measured."""

import math

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from megablocks_core.train.drawing import choose_scale, draw_smoothed, label_ends, running_mean


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1.0, 31.0], "log"),
        ([1.0, 29.0], "linear"),
        ([-1.0, 100.0], "linear"),
        ([0.0, 100.0], "linear"),
        ([1.0, math.inf, 2.0], "linear"),
        ([], "linear"),
    ],
)
def test_a_wide_range_of_positive_values_is_logarithmic(values, scale):
    axes = Figure().subplots()
    choose_scale(axes, values)
    assert axes.get_yscale() == scale


def test_the_running_mean_keeps_a_line_and_its_ends():
    line = [2.0 * place for place in range(9)]
    assert running_mean(line, 3) == line
    assert running_mean([0.0, 3.0, 0.0], 1) == [0.0, 1.0, 0.0]
    assert running_mean([5.0, 1.0], 0) == [5.0, 1.0]


def test_what_is_not_finite_spoils_no_mean_but_its_own():
    smooth = running_mean([1.0, math.inf, 3.0, 3.0, math.nan], 1)
    assert smooth[:4] == [1.0, math.inf, 3.0, 3.0] and math.isnan(smooth[4])


def test_many_values_are_drawn_pale_beneath_their_mean():
    axes = Figure().subplots()
    end = draw_smoothed(axes, [(step, float(step % 2)) for step in range(200)], "blue")
    assert [line.get_alpha() for line in axes.lines] == [0.25, None] and end == (199, 1.0)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_labels_stand_apart_at_any_scale(scale):
    axes = Figure().subplots()
    axes.set_yscale(scale)
    axes.set_ylim(1, 1000)
    label_ends(axes, [(0, 50.0, "a", "k"), (0, 50.0, "b", "k"), (0, math.nan, "c", "k")])
    places = [text.xy for text in axes.texts if isinstance(text, Annotation)]
    (_, low), (_, high) = axes.transData.transform(places)
    assert high - low > 0.05 * axes.bbox.height
