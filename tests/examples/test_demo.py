"""`make demo` in a very small form: every act, what it leaves, and what it says to bad input."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from megablocks_core.export.quantising.recipe import RECIPES
from megablocks_core.train import read_run
from megablocks_core.train.figures import FIGURES
from tests.examples.tiny import EXAMPLES, SIZES, SIZES_OF, write_text

DEMO = EXAMPLES / "demo.py"


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MODELS = {"gpt": SIZES, **{name.removeprefix("pretrain_"): own for name, own in SIZES_OF.items()}}


def _line(folder, *more, model="gpt"):
    text = folder / "tables.jsonl"
    more = (*more, *([] if model == "gpt" else ["--model", model]))
    sizes = [word for word in MODELS[model] if not word.startswith(("--dtype", "--save"))]
    line = [DEMO, "--out", folder / "demo", "--data", text, *sizes, "--steps=12", *more]
    return [str(word) for word in line]


@pytest.fixture(scope="module")
def run(fork_server):
    """Runs the demo; its exit code, and what it printed and said of errors."""

    def to_its_end(folder, *more, model="gpt"):
        process = fork_server.start(*_line(folder, *more, model=model), environment=ONE_THREAD)
        printed, errors = process.communicate(timeout=500)
        return process.returncode, printed, errors

    return to_its_end


@pytest.fixture(
    scope="module",
    params=["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hybrid", "mamba"))],
)
def done(request, tmp_path_factory, run):
    """A demo that ran to its end: its folder and what it printed."""
    folder = tmp_path_factory.mktemp(f"demo_{request.param}")
    write_text(folder)
    code, printed, errors = run(folder, "--price-per-hour=3.6", model=request.param)
    assert code == 0, printed + errors
    return folder, printed


def test_it_tells_what_it_does_and_finds(done):
    folder, printed = done
    apart = "--tp 2" if "mamba" in folder.name else "--tp 2 --ep 2"
    for words in (
        f"Two ranks that share every layer ({apart}), killed after step 4",
        "kill -9",
        "Going on from the last checkpoint: data-parallel ranks 2, ZeRO stage 1",
        "One process, 12 steps",
        "loss, two ranks and one process, first 12 steps, float32",
        f"{folder / 'demo' / 'exported'}: whole",
        "holds what the run wrote of the model in its memory",
        "logits, those of the checkpoint and of the exported folder: 0.0e+00",
        "logits, those of the exported folder here and in transformers",
        *(f"{folder / 'demo' / 'servers' / name}: whole; its weights move" for name in RECIPES),
        f"{folder / 'demo' / 'servers' / 'trtllm'}: {_served(folder)}",
        f"{folder / 'demo' / 'report.html'}, ",
    ):
        assert words in printed


def _served(folder):
    said = {"hybrid": "not written: model_type=", "mamba": "whole, tp 1"}
    return said.get(folder.name.split("_")[1].rstrip("0123456789"), "whole, tp 2")


def test_the_killed_run_went_on_to_its_end(done):
    run = read_run(done[0] / "demo")
    assert [line.step for line in run.lines] == list(range(12))
    killed, resumed = run.starts
    assert killed["ended"] is None and resumed["error"] is None
    assert 2 <= resumed["step"] <= 6
    labels = ["tp=2, dp=1, zero=0", "tp=1, dp=2, zero=1"]
    if "mamba" not in done[0].name:
        labels = [f"{label}, ep={ep}, etp=1" for label, ep in zip(labels, (2, 1), strict=True)]
    assert [killed["label"], resumed["label"]] == labels
    assert run.lines[-1].values["loss"] < run.lines[0].values["loss"]


def test_the_report_has_every_hard_metric_or_says_why_not(done):
    report = json.loads((done[0] / "demo" / "report.json").read_text())
    keys = {figure.key for group in FIGURES.values() for figure in group}
    record = {"versions", "commit", "hardware", "mesh", "data", "tokenizer", "spec", "command_line"}
    assert keys | record <= report.keys() | report["absent"].keys()
    assert all(isinstance(reason, str) and reason for reason in report["absent"].values())
    assert not report["absent"].keys() - {"network_bytes_per_second", "commit"}
    assert report["interruptions"] == 1 and report["errors"] == 0
    assert report["recovery_seconds"] > 0
    distances = report["layout_distance"]
    assert len(distances) == 3 and max(distances.values()) < 1e-5


def test_the_page_shows_the_picture_and_the_sample(done):
    demo = done[0] / "demo"
    assert (demo / "loss.png").read_bytes().startswith(b"\x89PNG")
    page = (demo / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "What it writes" in page and "def " in page


def test_transformers_opens_the_model(done):
    for folder in ("hf", "exported"):
        model = AutoModelForCausalLM.from_pretrained(done[0] / "demo" / folder)
        assert model(input_ids=torch.tensor([[100, 101, 102]])).logits.shape == (1, 3, 257)


def test_a_folder_with_a_run_is_refused(done, run):
    before = sorted((path, path.stat().st_mtime_ns) for path in done[0].rglob("*"))
    code, _, errors = run(done[0])
    assert code == 1
    assert errors.count("\n") == 1 and "holds a run already" in errors
    assert sorted((path, path.stat().st_mtime_ns) for path in done[0].rglob("*")) == before


def test_text_that_is_not_there_ends_it_in_a_few_lines(tmp_path, run):
    code, _, errors = run(tmp_path)
    assert code == 1
    lines = errors.splitlines()
    assert 2 <= len(lines) <= 3
    assert str(tmp_path / "tables.jsonl") in lines[0]
    assert lines[-1] == "training ended with exit code 1"


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.drill),
        pytest.param(signal.SIGHUP, marks=pytest.mark.drill),
        pytest.param(signal.SIGKILL, marks=pytest.mark.drill),
    ],
)
def test_stopped_in_the_middle_it_leaves_no_process(number, tmp_path):
    write_text(tmp_path)
    command = [sys.executable, *_line(tmp_path, "--steps=5000")]
    demo = subprocess.Popen(
        command,
        env={**os.environ, **ONE_THREAD},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (tmp_path / "demo" / "metrics.jsonl").exists():
            assert demo.poll() is None
            time.sleep(0.05)
        assert len(_processes_of(tmp_path)) == 3
        demo.send_signal(number)
        errors = demo.communicate(timeout=30)[1]
    finally:
        demo.kill()
    if number == signal.SIGKILL:
        time.sleep(1)
    else:
        assert demo.returncode == 1
        assert errors.splitlines()[-1] == "stopped"
        assert "Traceback" not in errors
    assert not _processes_of(tmp_path)


def _processes_of(folder):
    """Processes with ``folder`` in their command line."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    )
    return [row for row in listed.stdout.splitlines() if str(folder) in row]
