"""Runs side by side: figures with their differences, and records where they differ."""

import re
from pathlib import Path

import torch

from megablocks_core.train import (
    Mean,
    RunFolder,
    Scheduled,
    cosine_schedule,
    read_run,
    run_record,
)
from megablocks_core.train.comparison import comparison, differences, named_runs
from megablocks_core.train.folder import Run
from megablocks_core.train.lines import Line


def run_of(path, *, seconds=0.5, **record):
    values = {"tokens_per_second": Mean(100, seconds), "step_seconds": Mean(seconds)}
    lines = [Line(step, 0.0, {"loss": Mean(2.0), **values}) for step in range(3)]
    fate = {"step": 0, "started": seconds, "ended": 9.0, "error": None, "recovery_seconds": None}
    return Run(Path(path), lines, [{**fate, **record}] if record else [], {})


def text_of(html):
    return " ".join(re.sub("<[^>]+>", " ", html).split())


def test_only_what_differs_is_told_by_dotted_keys():
    first = {"spec": {"hidden": 64, "layers": 2}, "mesh": "tp=1", "data": None}
    second = {"spec": {"hidden": 64, "layers": 4}, "mesh": "tp=1", "seed": 0}
    assert differences([first, second]) == {"spec.layers": [2, 4], "seed": [None, 0]}
    assert differences([first, first]) == {}


def test_figures_stand_side_by_side_with_their_difference_from_the_first():
    runs = [run_of("a", mesh="tp=1 <fast>"), run_of("b", seconds=0.4, mesh="tp=2")]
    html = comparison(runs, price_per_hour=3.6)
    text = text_of(html)
    assert "tokens_per_second 200 /s 250 /s +25.0 %" in text
    assert "step_seconds 0.5 s 0.4 s -20.0 %" in text
    assert "cost_per_step 0.0005 0.0004 -20.0 %" in text
    assert "mesh tp=1 &lt;fast&gt; tp=2" in text and "<fast>" not in html
    assert "started" not in text and "mfu" not in text
    assert html.count("data:image/png;base64,") == 1 and "http" not in html


def test_runs_that_agree_or_have_no_record():
    assert "Nothing:" in text_of(comparison([run_of("a"), run_of("b")]))
    text = text_of(comparison([run_of("a", mesh="x"), run_of("b"), run_of("c", mesh="x")]))
    assert text.startswith("3 runs") and "mesh x &ndash; x" in text


def test_runs_of_one_name_go_by_their_paths():
    assert list(named_runs([run_of("x/run"), run_of("y/run")])) == ["x/run", "y/run"]
    assert list(named_runs([run_of("x/a"), run_of("y/b")])) == ["a", "b"]


def test_rates_and_schedules_that_differ_are_told(tmp_path):
    for name, lr, length in (("slow", 0.1, 100), ("fast", 0.2, 50)):
        optimizer = torch.optim.SGD([torch.ones(1)], lr=lr)
        rate = Scheduled(optimizer, cosine_schedule(length))
        record = run_record(optimizer=optimizer, schedule=rate)
        with RunFolder(tmp_path / name, record=record) as run:
            run.write(0, {"loss": 1.0})
    page = comparison(read_run(tmp_path / name) for name in ("slow", "fast"))
    assert "<code>optimizer.lr</code></td><td>0.1</td><td>0.2</td>" in page
    assert "Ramp(length=100" in page and "Ramp(length=50" in page
    assert "<code>optimizer.momentum</code>" not in page
