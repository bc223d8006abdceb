"""pretrain_moe.py trains the stored curve at any layout, evens out its loads, and draws them."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from examples.pretrain_moe import parse, train
from megablocks_core.testing import ranks
from megablocks_core.train import read_run
from megablocks_core.train.expert_load import expert_loads
from tests.examples.tiny import write_text

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


@pytest.mark.parametrize("layout", [["--tp=2", "--ep=2"], ["--ep=2"], ["--tp=2"]], ids=" ".join)
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
