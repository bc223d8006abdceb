"""``megablocks-report`` writes a page, a picture and JSON, or says what is wrong."""

import json
import math
import shutil
import subprocess
import sys

import pytest

from megablocks_core.train import Mean, RunFolder, StepTimer, add_to_summary, run_record
from megablocks_core.train.record import PARTS
from megablocks_core.train.report import main, write_report


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    timer = StepTimer()
    record = run_record(label="tp=1", flops_per_token=10.0, peak_flops=1e12)
    with RunFolder(path, record=record) as folder:
        for step in range(30):
            with timer("data"):
                pass
            timer.step(tokens=8, read_bytes=16)
            values = {"loss": Mean(8 * math.exp(-step / 9), 8), "grad_norm": 1.0}
            folder.write(step, {**values, **timer.reduce()})
    return path


def test_the_folder_gets_page_picture_and_json(run):
    add_to_summary(run, {"layout_distance": {"float32": 3e-7}})
    place = write_report(run, price_per_hour=3.6)
    assert place == run / "report.html" and "Hard metrics" in place.read_text()
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((run / "report.json").read_text())
    assert report["loss"] == math.exp(-29 / 9)
    assert report["layout_distance"] == {"float32": 3e-7}
    assert report["cost_per_step"] == pytest.approx(report["step_seconds"] / 1000)
    assert report["absent"].keys() == {
        "communication_wait_share",
        "recovery_seconds",
        "validation_loss",
        "skipped_steps",
        "checkpoint_seconds",
        "mesh",
        "spec",
        "data",
        "tokenizer",
        "optimizer",
        "schedule",
    } | ({"commit"} - report.keys())
    assert report["versions"]["torch"] and report["hardware"]["cores"] and report["command_line"]
    assert all(isinstance(reason, str) and reason for reason in report["absent"].values())


def test_a_price_is_absent_until_given(run):
    write_report(run)
    report = json.loads((run / "report.json").read_text())
    assert "cost_per_token" in report["absent"] and "--price-per-hour" in str(report["absent"])


def test_a_loss_that_is_not_finite_gives_json_and_a_count(run):
    with RunFolder(run, record=run_record(), step=30) as folder:
        folder.write(30, {"loss": math.nan, "grad_norm": math.inf})
    write_report(run)
    report = json.loads((run / "report.json").read_text(), parse_constant=pytest.fail)
    assert "loss" in report["absent"]
    assert (report["loss_anomalies"], report["grad_norm_anomalies"]) == (1, 1)


def test_the_command_reports_each_run_and_names_what_is_wrong(run, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "time": 0}\n')
    assert main([str(tmp_path / "absent"), str(broken), str(run)]) == 1
    out, err = capsys.readouterr()
    assert out == f"{run / 'report.html'}\n"
    assert "absent must be a folder" in err and "metrics.jsonl, line 1" in err
    assert main([str(run), "--price-per-hour", "2"]) == 0


def test_the_record_stands_in_the_json_part_by_part(run):
    given = {"mesh": "tp=1", "spec": {"layers": 2}, "data": "9f3c", "tokenizer": "bytes"}
    given |= {"optimizer": {"lr": 0.1}, "schedule": "constant"}
    with RunFolder(run, record=run_record(**given, command_line=["train"]), step=30) as folder:
        folder.write(30, {"loss": 1.0})
    write_report(run)
    report = json.loads((run / "report.json").read_text())
    assert {key: report[key] for key in given} == given and report["command_line"] == ["train"]
    (run / "record.json").unlink()
    write_report(run)
    report = json.loads((run / "report.json").read_text())
    assert set(PARTS) <= report["absent"].keys() and not set(PARTS) & report.keys()


def test_several_runs_are_compared(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "other")
    assert main([str(run), "other"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "comparison.html"
    assert "run and other" in (tmp_path / "comparison.html").read_text()
    place = tmp_path / "absent" / "page.html"
    assert main([str(run), "other", "--comparison", str(place)]) == 1
    assert "page.html" in capsys.readouterr().err


def test_a_watched_run_shows_its_layers(run):
    with RunFolder(run, record=run_record(), step=30) as folder:
        folder.write(30, {"gradient.norm/layers.0.weight": 2.0, "activation.rms/layers.0": 1.0})
    assert "Layers" in write_report(run).read_text()


def test_the_command_runs_as_a_program(run):
    command = [sys.executable, "-m", "megablocks_core.train.report", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{run / 'report.html'}\n"), done.stderr
