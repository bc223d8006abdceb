"""A run's folder tells every start, its end and its recovery, whatever ended it."""

import json
import math
import signal
import subprocess
import sys
import time

import pytest

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import Mean, RunFolder, add_to_summary, read_run
from megablocks_core.train.figures import total_of
from megablocks_core.train.folder import ended_well


def write_steps(path, first, last):
    with RunFolder(path, record={"label": f"from {first}"}, step=first) as run:
        for step in range(first, last):
            run.write(step, {"loss": Mean(float(step), 1)})


def test_a_run_in_two_planned_starts(tmp_path):
    write_steps(tmp_path / "run", 0, 4)
    write_steps(tmp_path / "run", 4, 6)
    add_to_summary(tmp_path / "run", {"a": 1, "b": 2})
    add_to_summary(tmp_path / "run", {"b": float("nan")})
    run = read_run(tmp_path / "run")
    assert [line.step for line in run.lines] == list(range(6))
    assert [(s["label"], s["step"], s["recovery_seconds"]) for s in run.starts] == [
        ("from 0", 0, None),
        ("from 4", 4, None),
    ]
    assert all(ended_well(start) and start["ended"] >= start["started"] for start in run.starts)
    assert run.summary == {"a": 1, "b": None}


def test_what_comes_after_the_last_line_counts_with_it(tmp_path):
    for first, last, seconds in ((0, 4, 9.0), (4, 6, 2.0), (5, 5, 7.0)):
        with RunFolder(tmp_path, record={}, step=first) as run:
            for step in range(first, last):
                run.write(step, {"checkpoint_seconds": Mean(1.0, 1)})
            run.add({"checkpoint_seconds": Mean(0.0)})
            run.add({"checkpoint_seconds": Mean(seconds, 2), "odd": float("nan")})
    run = read_run(tmp_path)
    assert [line.step for line in run.lines] == [0, 1, 2, 3, 4]  # line 5 was taken back
    total = total_of(run.lines, "checkpoint_seconds")
    assert (total.sum, total.count) == (5 + 9, 5 + 2)
    assert math.isnan(run.lines[3].values["odd"])
    assert "odd" not in run.lines[4].values


def test_two_runs_at_once_are_refused(tmp_path):
    with (
        RunFolder(tmp_path, record={}) as run,
        pytest.raises(ValueError, match="metrics.jsonl is being written by another run"),
    ):
        run.write(0, {"loss": 1.0})
        RunFolder(tmp_path, record={})
    assert len(read_run(tmp_path).starts) == 1
    write_steps(tmp_path, 1, 2)


def test_an_error_is_recorded_and_goes_on(tmp_path):
    with pytest.raises(ZeroDivisionError), RunFolder(tmp_path, record={}) as run:
        run.write(0, {"loss": 1.0})
        raise ZeroDivisionError("1/0")
    (start,) = read_run(tmp_path).starts
    assert start["error"] == "ZeroDivisionError: 1/0" and not ended_well(start)


def test_a_killed_run_recovers_and_says_how_long_it_took(tmp_path):
    code = """
import sys, time
from megablocks_core.train import RunFolder
run = RunFolder(sys.argv[1], record={"label": "killed"})
for step in range(10**6):
    run.write(step, {"loss": float(step)})
    time.sleep(0.005)
"""
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    lines = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not lines.exists() or lines.read_bytes().count(b"\n") < 8:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    last_sign = read_run(tmp_path).lines[-1].time

    write_steps(tmp_path, 5, 7)
    run = read_run(tmp_path)
    killed, resumed = run.starts
    assert killed["ended"] is None and ended_well(resumed)
    assert resumed["recovery_seconds"] == pytest.approx(run.lines[5].time - last_sign, abs=0.2)
    assert [line.values["loss"] for line in run.lines] == [float(step) for step in range(7)]


@pytest.mark.parametrize("fails", ["os.fsync", "os.replace"])
def test_the_record_is_written_aside_and_stays_whole(tmp_path, monkeypatch, fails):
    write_steps(tmp_path, 0, 1)
    before = (tmp_path / "record.json").read_text()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(fails, full)
    with pytest.raises(OSError, match="no space"):
        RunFolder(tmp_path, record={}, step=1)
    assert (tmp_path / "record.json").read_text() == before


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent must be a folder"):
        read_run(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"must hold metrics.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics.jsonl must hold at least one whole line"):
        read_run(tmp_path)
    write_steps(tmp_path, 0, 1)
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(ValueError, match=r"record.json is not JSON"):
        read_run(tmp_path)
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(ValueError, match=r"record.json must hold a list"):
        RunFolder(tmp_path, record={}, step=1)


@ranks(2)
def test_only_rank_0_writes(tmp_path):
    group = Mesh().group("dp")
    with RunFolder(tmp_path, record={"rank": group.rank}, group=group) as run:
        run.write(0, {"loss": float(group.rank)})
    group.barrier()
    run.add({"loss": 2.0})
    group.barrier()
    assert [start["rank"] for start in json.loads((tmp_path / "record.json").read_text())] == [0]
    assert [line.values for line in read_run(tmp_path).lines] == [{"loss": 1.0}]  # of 0 and 2


def test_steps_that_are_done_again_are_counted(tmp_path):
    """After lines up to 5 a start at 3 does three steps again, one at 6 none."""
    for first, last in ((0, 6), (3, 6), (6, 7)):
        write_steps(tmp_path, first, last)
    assert [start["repeated_steps"] for start in read_run(tmp_path).starts] == [0, 3, 0]
