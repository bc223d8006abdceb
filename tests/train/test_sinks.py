"""Values reach every sink from one rank, and an extra that is missing is named."""

import math
import sys
from types import ModuleType

import pytest
import torch.distributed as dist

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import (
    JsonLines,
    Mean,
    RunFolder,
    Sinks,
    TensorBoard,
    WandB,
    read_lines,
    read_run,
)


class Memory:
    """A sink that remembers, and fails if it is told to."""

    def __init__(self, log, name, *, fails=False):
        self.log, self.name, self.fails = log, name, fails

    def write(self, step, values):
        self.log.append((self.name, step, dict(values)))
        if self.fails:
            raise OSError(f"{self.name} is full")

    def close(self):
        self.log.append((self.name, "closed"))
        if self.fails:
            raise OSError(f"{self.name} is full")


def board(path):
    """Scalars of a TensorBoard folder: name -> [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_every_sink_is_told_even_after_one_has_failed():
    log = []
    sinks = Sinks(Memory(log, "a"), Memory(log, "b", fails=True), Memory(log, "c"))
    with pytest.raises(OSError, match="b is full"):
        sinks.write(3, {"loss": 1.0})
    assert log == [(name, 3, {"loss": 1.0}) for name in "abc"]
    log.clear()
    with pytest.raises(OSError, match="b is full"):
        sinks.close()
    assert log == [(name, "closed") for name in "cba"]


def test_a_block_closes_its_sinks_and_tells_the_run_of_an_error(tmp_path):
    log = []
    run = RunFolder(tmp_path, record={"label": ""})
    with pytest.raises(KeyError), Sinks(run, Memory(log, "a")) as sinks:
        sinks.write(0, {"loss": Mean(6.0, 4)})
        raise KeyError("broken")
    assert log[-1] == ("a", "closed")
    read = read_run(tmp_path)
    assert read.lines[0].values == {"loss": 1.5} and read.lines[0].values["loss"].count == 4
    assert read.starts[0]["error"] == "KeyError: 'broken'"
    again = RunFolder(tmp_path, record={"label": ""}, step=1)
    Sinks(again).close()
    assert read_run(tmp_path).starts[1]["error"] is None


def test_tensorboard_shows_what_was_written_and_hides_steps_that_ran_again(tmp_path):
    first = TensorBoard(tmp_path)
    for step in range(4):
        first.write(step, {"loss": Mean(-3.0 * step, 2), "time/step_seconds": 0.5})
    first.close()
    resumed = TensorBoard(tmp_path, step=2)
    resumed.write(2, {"loss": 8.0, "grad_norm": math.nan})
    resumed.close()
    found = board(tmp_path)
    assert found["loss"] == [(0, 0.0), (1, -1.5), (2, 8.0)]
    assert found["time/step_seconds"] == [(0, 0.5), (1, 0.5)]
    assert math.isnan(found["grad_norm"][0][1])


@ranks(2)
def test_only_the_first_rank_writes(tmp_path):
    group = Mesh().group("dp")
    lines = JsonLines(tmp_path / "lines.jsonl", group=group)
    with Sinks(lines, TensorBoard(tmp_path / "board", group=group)) as sinks:
        sinks.write(0, {"loss": 1.0 + dist.get_rank()})
    dist.barrier()
    assert [line.values for line in read_lines(tmp_path / "lines.jsonl")] == [{"loss": 1.0}]
    assert board(tmp_path / "board") == {"loss": [(0, 1.0)]}
    assert len(list((tmp_path / "board").iterdir())) == 1


def test_wandb_is_told_what_its_interface_asks_for(tmp_path, monkeypatch):
    """Over a stand-in with the two calls that are used, as wandb documents them."""
    calls = []

    class Run:
        def log(self, data, step=None):
            calls.append(("log", data, step))

        def finish(self):
            calls.append("finish")

    def init(**options):
        calls.append(options)
        return Run()

    stand_in = ModuleType("wandb")
    stand_in.__dict__["init"] = init
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    sink = WandB("project", run_id="a", path=tmp_path, config={"tp": 2}, mode="offline")
    sink.write(5, {"loss": Mean(3.0, 2)})
    sink.close()
    sink.close()
    assert calls == [
        {
            "project": "project",
            "name": None,
            "id": "a",
            "resume": "allow",
            "dir": str(tmp_path),
            "config": {"tp": 2},
            "mode": "offline",
        },
        ("log", {"loss": 1.5}, 5),
        "finish",
    ]
    assert type(calls[1][1]["loss"]) is float


@pytest.mark.parametrize(
    ("make", "missing", "extra"),
    [
        (lambda path: TensorBoard(path), ("tensorboard", "torch.utils.tensorboard"), "tensorboard"),
        (lambda path: WandB("project", path=path), ("wandb",), "wandb"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(make, missing, extra, tmp_path, monkeypatch):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"pip install 'megablocks-core\[{extra}\]'"):
        make(tmp_path)
