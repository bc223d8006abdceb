"""The run record says what a run was, in JSON."""

import json
import subprocess
import sys

import torch

from megablocks_core.train import Scheduled, constant_schedule, cosine_schedule, run_record
from megablocks_core.train.record import git_commit


def test_it_holds_what_is_known_and_what_is_given():
    record = run_record(
        label="tp=2",
        mesh="2 ranks",
        spec={"hidden_size": 64, "dtype": torch.float32, "layers": ("a", {"b"})},
        data={"train": "9f3c"},
        tokenizer="bytes",
        command_line=["train.py", "--steps", "3"],
        flops_per_token=6e6,
        peak_flops=1e11,
        price_per_hour=0.5,
    )
    assert json.loads(json.dumps(record)) == record
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["python"].startswith(f"3.{sys.version_info.minor}.")
    assert record["hardware"]["cores"] >= 1
    assert record["spec"] == {"hidden_size": 64, "dtype": "torch.float32", "layers": ["a", ["b"]]}
    assert (record["mesh"], record["data"], record["tokenizer"]) == (
        "2 ranks",
        {"train": "9f3c"},
        "bytes",
    )
    assert record["command_line"] == ["train.py", "--steps", "3"]
    assert (record["flops_per_token"], record["peak_flops"]) == (6e6, 1e11)


def test_it_needs_no_argument():
    assert run_record()["command_line"] == sys.argv


def test_the_commit_is_that_of_the_checkout_with_a_note_of_changes(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(str(tmp_path)) is None
    git("init", "-q")
    assert git_commit(str(tmp_path)) is None  # no commit yet
    (tmp_path / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_commit(str(tmp_path)) == commit
    (tmp_path / "train.py").write_text("2")
    assert git_commit(str(tmp_path)) == commit + "+changes"


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None


def test_an_optimizer_is_told_by_its_options_and_a_schedule_by_its_text():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.25), momentum=0.9)
    rate = Scheduled(optimizer, cosine_schedule(100, warmup=5), base=[0.25, 0.5])
    record = run_record(optimizer=optimizer, schedule={"lr": rate, "decay": constant_schedule()})
    assert json.loads(json.dumps(record)) == record
    told = record["optimizer"]
    assert (told["class"], told["lr"], told["momentum"]) == ("SGD", [0.25, 0.5], 0.9)
    assert "params" not in told
    base = record["schedule"]["lr"]
    assert (base["option"], base["base"]) == ("lr", [0.25, 0.5])
    assert base["factor"] == str(cosine_schedule(100, warmup=5)) and "length=95" in base["factor"]
    assert record["schedule"]["decay"] == "Constant(factor=1.0, length=inf)"
