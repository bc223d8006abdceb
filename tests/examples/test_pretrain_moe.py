"""pretrain_moe.py trains the stored curve at any layout, evens out its loads, and draws them."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from examples.pretrain_moe import batches, parse, train
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import read_run
from megablocks_core.train.expert_load import expert_loads
from tests.examples.tiny import EXAMPLES, write_text

GOLDEN = Path(__file__).with_name("pretrain_moe.json")


def losses(folder, *more):
    """Of 20 steps in float64, on text that is the same everywhere."""
    text = Path(folder) / "tables.jsonl"
    if dist.is_initialized() and dist.get_rank():
        dist.barrier()
    else:
        write_text(folder)
        if dist.is_initialized():
            dist.barrier()
    words = ["--out", str(Path(folder) / "run"), "--data", str(text), "--dtype=float64"]
    return train(parse([*words, "--steps=20", "--batch-size=4", *more]))


def test_golden_curve(tmp_path):
    found = losses(tmp_path)
    assert found == pytest.approx(json.loads(GOLDEN.read_text())["loss"], rel=0, abs=1e-12)
    assert found[-1] < 0.75 * found[0]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Load of each expert over steps" in page


@pytest.mark.parametrize(
    "layout",
    [["--tp=2", "--ep=2"], ["--ep=2"], pytest.param(["--tp=2"], marks=pytest.mark.slow)],
    ids=" ".join,
)
@ranks(2, timeout=240)
def test_two_ranks_train_the_golden_curve(layout, tmp_path):
    found = losses(tmp_path, *layout)
    assert found == pytest.approx(json.loads(GOLDEN.read_text())["loss"], rel=0, abs=1e-9)


def test_the_bias_evens_loads_out(tmp_path):
    losses(tmp_path, "--bias-rate=0.05")
    for layer in expert_loads(read_run(tmp_path / "run")).values():
        first, last = ([row[step] for row in layer.values()] for step in (0, 19))
        assert max(last) < max(first)


def test_it_runs_as_a_script(tmp_path, printed):
    out = tmp_path / "run"
    words = ["--out", str(out), "--data", str(write_text(tmp_path)), "--steps=3"]
    first, *others = printed("pretrain_moe.py", *words, "--tp=2", "--ep=2", ranks=2)
    assert first.splitlines()[-1] == str(out / "report.html")
    assert not any(others)


@pytest.mark.parametrize(
    "words", [["--steps=0"], ["--batch-size=0"], ["--bias-rate=nan"], ["--bias-rate=-1"]], ids=str
)
def test_values_out_of_range_are_refused_before_anything_is_written(words, capsys):
    with pytest.raises(SystemExit):
        parse(words)
    assert words[0].partition("=")[0] in capsys.readouterr().err


@ranks(2)
def test_a_batch_that_does_not_divide_over_ranks_is_refused():
    """A sequence that stands in for none would count in the loads."""
    with pytest.raises(ValueError, match="--batch-size 7 must divide over 2 ranks"):
        batches(parse(["--batch-size=7"]), Mesh())


def test_text_that_is_not_there_leaves_no_folder(tmp_path):
    options = parse([f"--out={tmp_path / 'run'}", f"--data={tmp_path / 'nowhere'}"])
    with pytest.raises(OSError, match="nowhere"):
        batches(options, Mesh())
    assert not (tmp_path / "run").exists()


def test_ctrl_c_ends_it_in_a_word(tmp_path, launch):
    words = ["--out", str(tmp_path / "run"), "--data", str(write_text(tmp_path)), "--steps=10000"]
    (process,) = launch(EXAMPLES / "pretrain_moe.py", *words)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.endswith("stopped\n")
