"""The record names the rank that failed first, however the others went down with it."""

import json
import subprocess
import sys
import time

import pytest

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import RunFolder, read_run


@ranks(2)
def test_the_error_is_that_of_the_rank_that_failed_first(tmp_path):
    """Rank 0 falls over what rank 1 did not send, and keeps the record."""
    group = Mesh().group("dp")
    folder = group.broadcast_object(str(tmp_path))
    for first in (1, 0):
        errors = {first: KeyError("shard 7"), 1 - first: RuntimeError("connection closed")}
        with pytest.raises(type(errors[group.rank])), RunFolder(folder, record={}, group=group):
            if group.rank != first:
                time.sleep(0.1)
            raise errors[group.rank]
        group.barrier()
        expected = "KeyError: 'shard 7'"
        assert read_run_starts(folder)[-1] == ("rank 1: " + expected if first else expected)


def read_run_starts(folder):
    return [start["error"] for start in json.loads(open(f"{folder}/record.json").read())]


@ranks(2)
def test_an_error_that_all_ranks_raise_is_told_once(tmp_path):
    group = Mesh().group("dp")
    folder = group.broadcast_object(str(tmp_path))
    with pytest.raises(ArithmeticError), RunFolder(folder, record={}, group=group):
        if group.rank == 0:
            time.sleep(0.1)
        raise ArithmeticError("norm=nan")
    group.barrier()
    assert read_run_starts(folder) == ["ArithmeticError: norm=nan"]


_RANKS = """
import os, sys, time
import torch.distributed as dist
from megablocks_core.groups import Mesh
from megablocks_core.train import RunFolder
rank = int(sys.argv[2])
store = dist.FileStore(sys.argv[1] + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = Mesh().group("dp")
with RunFolder(sys.argv[1] + "/run", record={}, group=group) as run:
    run.write(0, {"loss": 1.0})
    group.barrier()
    if rank == 1:
        raise ValueError("row 12 of shard 7")
    if sys.argv[3] == "killed":
        time.sleep(60)
    group.barrier()
"""


@pytest.mark.parametrize("end", ["waits", "killed"])
def test_real_processes_leave_the_first_cause_behind(end, tmp_path):
    """Rank 0 waits for a message that does not come; or is killed, as launchers do."""
    command = [sys.executable, "-c", _RANKS, str(tmp_path)]
    first, second = (
        subprocess.Popen([*command, rank, end], stderr=subprocess.DEVNULL) for rank in "01"
    )
    assert second.wait(60) == 1
    if end == "killed":
        first.kill()
    assert first.wait(60) != 0
    (start,) = read_run(tmp_path / "run").starts
    assert start["error"] == "rank 1: ValueError: row 12 of shard 7"
    assert (start["ended"] is None) == (end == "killed")

    with RunFolder(tmp_path / "run", record={}, step=1) as run:
        run.write(1, {"loss": 1.0})
    errors = [start["error"] for start in json.loads((tmp_path / "run/record.json").read_text())]
    assert errors == ["rank 1: ValueError: row 12 of shard 7", None]
    assert not list((tmp_path / "run").glob("failed.*"))


def test_a_file_that_cannot_be_read_hides_no_error(tmp_path):
    with pytest.raises(KeyError), RunFolder(tmp_path, record={}) as run:
        run.write(0, {"loss": 1.0})
        (tmp_path / "failed.0.rank.1.json").write_text("{")
        raise KeyError("own")
    (start,) = read_run(tmp_path).starts
    assert start["error"] == "KeyError: 'own'"
