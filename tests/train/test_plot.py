"""The picture is written, and says what the run says."""

import math
import sys
from pathlib import Path

import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure

from megablocks_core.train import Mean
from megablocks_core.train.drawing import STYLE
from megablocks_core.train.folder import Run
from megablocks_core.train.lines import Line
from megablocks_core.train.plot import plot_loss


def run_of(*names, steps=100, starts=(0,), spike=None, value=9.0):
    lines = [
        Line(step, 0.0, {name: Mean(value if step == spike else 5 - step / 50) for name in names})
        for step in range(steps)
    ]
    records = [{"step": step, "label": f"tp={number}"} for number, step in enumerate(starts, 1)]
    return Run(Path("run"), lines, records, {})


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """A function that plots a run and returns the axes."""
    kept = []
    save = Figure.savefig

    def keep(figure, *arguments, **options):
        kept.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(run):
        plot_loss(run, tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
        return kept[-1].axes

    return draw


def words(axes):
    return [text.get_text() for text in axes.texts]


def test_curves_are_named_at_their_ends_and_axes_have_units(drawn):
    losses, norms = drawn(run_of("loss", "validation_loss", "grad_norm"))
    assert {"training 3.02", "validation 3.02", "tp=1"} == set(words(losses))
    assert losses.get_ylabel() == "loss (nats per token)"
    assert (norms.get_ylabel(), norms.get_xlabel()) == ("gradient norm", "step")


def test_names_do_not_lie_on_each_other(drawn):
    (losses,) = drawn(run_of("loss", "validation_loss"))
    low, high = sorted(text.xy[1] for text in losses.texts if " 3.02" in text.get_text())
    assert high - low > 0.03 * (losses.get_ylim()[1] - losses.get_ylim()[0])


def test_a_start_is_marked_where_it_went_on_and_only_if_it_left_lines(drawn):
    (losses,) = drawn(run_of("loss", starts=(0, 60, 60)))
    assert set(words(losses)) == {"training 3.02", "tp=1", "resumed: tp=3"}
    assert [line.get_xdata()[0] for line in losses.lines if line.get_linestyle() == "--"] == [60]


def test_an_anomaly_is_ringed(drawn):
    _, norms = drawn(run_of("loss", "grad_norm", spike=50))
    assert words(norms) == ["anomaly"]


def test_a_value_that_is_not_finite_is_crossed_and_breaks_no_scale(drawn):
    _, norms = drawn(run_of("loss", "grad_norm", spike=50, value=math.inf))
    assert words(norms) == ["not finite"] and norms.get_ylim()[1] < 10


def test_several_anomalies_are_counted(drawn):
    run = run_of("loss", "grad_norm", spike=50)
    run.lines[70].values["grad_norm"] = Mean(8.0)
    assert words(drawn(run)[1]) == ["2 anomalies"]


def test_a_learning_rate_is_drawn_beneath(drawn):
    axes = drawn(run_of("loss", "grad_norm", "learning_rate"))
    assert [each.get_ylabel() for each in axes] == [
        "loss (nats per token)",
        "gradient norm",
        "learning rate",
    ]


@pytest.mark.parametrize("names", [(), ("loss",), ("validation_loss",), ("grad_norm",)])
def test_a_run_with_little_to_show_is_drawn(drawn, names):
    drawn(run_of(*names, steps=1))


def test_matplotlib_is_left_as_it_was(drawn):
    before = {key: rcParams[key] for key in STYLE}
    drawn(run_of("loss"))
    assert {key: rcParams[key] for key in STYLE} == before


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"megablocks-core\[report\]"):
        plot_loss(run_of("loss"), tmp_path / "loss.png")


def test_validation_sets_have_curves_and_names_of_their_own(drawn):
    run = run_of("loss", "validation_loss/web", "validation_loss/code")
    losses = drawn(run)[0]
    said = words(losses)
    assert any(text.startswith("web ") for text in said)
    assert any(text.startswith("code ") for text in said)
    colors = {line.get_color() for line in losses.lines if len(line.get_xdata()) == 100}
    assert len(colors) == 3


def test_steps_that_a_guard_skipped_are_marked(drawn):
    run = run_of("loss")
    for line in run.lines:
        line.values["skipped"] = Mean(float(line.step in (20, 70)))
    losses = drawn(run)[0]
    assert "skipped" in words(losses)
    (marks,) = [line for line in losses.lines if line.get_marker() == "^"]
    assert list(marks.get_xdata()) == [20, 70]
    assert "skipped" not in words(drawn(run_of("loss"))[0])
