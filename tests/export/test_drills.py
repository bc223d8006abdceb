"""What kills, Ctrl-C, full disks and vanishing files leave of a folder in the making: nothing.

No rank waits for one that is gone, and the error says what happened.
"""

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.files import disk, is_unfinished
from megablocks_core.files.slices import TensorFile
from megablocks_core.groups import Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.testing import ranks
from tests.export.tiny_models import assert_same, pretrained, tiny_model

# Both ranks load and save; some of them stop at the third call of a function, and say so.
PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from megablocks_core.export import load_hf, save_hf
from megablocks_core.files import disk
from megablocks_core.files.slices import TensorFile
from megablocks_core.groups import Mesh
from megablocks_core.layers import Decoder, DecoderSpec

source, out, marks, stage, stopping = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = Mesh(tp=2)
model = Decoder(DecoderSpec.from_hf(source), mesh=mesh)
owner, name = {"load": (TensorFile, "read"), "save": (disk, "write")}[stage]
real, seen = getattr(owner, name), []

def stopped(*arguments):
    seen.append(1)
    if len(seen) == 3 and str(dist.get_rank()) in stopping:
        open(f"{marks}/{dist.get_rank()}", "w").close()
        time.sleep(8)
    return real(*arguments)

if stage == "load":
    setattr(owner, name, stopped)
load_hf(model, source, group=mesh.group("tp"))
setattr(owner, name, stopped)
save_hf(model, out, group=mesh.group("tp"), max_file_bytes=3000)
"""


def started(launch, folder, stage, stopping):
    """Two ranks, once those that stop have."""
    marks = folder / "marks"
    marks.mkdir()
    pretrained(folder / "in")
    (folder / "to").mkdir()
    words = ("-c", PROGRAM, folder / "in", folder / "to" / "out", marks, stage, stopping)
    processes = launch(*words, ranks=2)
    end = time.monotonic() + 100
    while len(list(marks.iterdir())) < len(stopping):
        assert time.monotonic() < end and not any(process.poll() for process in processes)
        time.sleep(0.01)
    return processes


@pytest.mark.drill
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", ["load", "save"])
def test_a_killed_rank_ends_the_other_and_leaves_nothing_that_looks_whole(
    tmp_path, launch, stage, rank
):
    processes = started(launch, tmp_path, stage, str(rank))
    processes[rank].kill()
    assert processes[rank].wait() == -signal.SIGKILL
    errors = processes[1 - rank].communicate(timeout=60)[1]
    assert "RuntimeError: " in errors and f"{stage}_hf(" in errors
    assert "not all of ranks [0, 1] answer" in errors
    left = list((tmp_path / "to").iterdir())
    assert all(is_unfinished(path) for path in left), left
    save_hf(tiny_model(), tmp_path / "to" / "out")
    verify(tmp_path / "to" / "out")


@pytest.mark.drill
@pytest.mark.parametrize("stopped", ["0", "1", "01"])
@pytest.mark.parametrize("stage", ["load", "save"])
def test_ctrl_c_ends_all_ranks_and_leaves_nothing(tmp_path, launch, stage, stopped):
    processes = started(launch, tmp_path, stage, stopped)
    for rank in map(int, stopped):
        processes[rank].send_signal(signal.SIGINT)
    for rank, process in enumerate(processes):
        errors = process.communicate(timeout=60)[1]
        mine = str(rank) in stopped
        assert ("KeyboardInterrupt" if mine else f"rank {stopped}: KeyboardInterrupt") in errors
        assert process.returncode != 0
    assert not list((tmp_path / "to").iterdir())


@contextmanager
def mounted(folder, options):
    """A small disk at a new folder."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("options", "message"),
    [("size=12k", "No space left on device"), ("ro", "Read-only file system")],
)
def test_a_real_disk_that_takes_no_more(tmp_path, launch, options, message):
    pretrained(tmp_path / "in")
    with mounted(tmp_path / "to", options):
        words = (tmp_path / "in", tmp_path / "to" / "out", tmp_path, "save", "-")
        processes = launch("-c", PROGRAM, *words, ranks=2)
        for process in processes:
            assert message in process.communicate(timeout=60)[1]
            assert process.returncode == 1
        assert not list((tmp_path / "to").iterdir())


@ranks(2)
def test_ctrl_c_on_one_rank_while_it_writes_is_told_to_the_other(tmp_path):
    pretrained(tmp_path / "in")
    world = Mesh(tp=2).group("tp")
    model = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=Mesh(tp=2))
    kind = KeyboardInterrupt if world.rank == 1 else RuntimeError
    message = "" if world.rank == 1 else r"_hf\(.*failed on rank 1: KeyboardInterrupt$"
    with _interrupted(TensorFile, "read", at=3), pytest.raises(kind, match=message):
        load_hf(model, tmp_path / "in", group=world)
    load_hf(model, tmp_path / "in", group=world)
    with _interrupted(disk, "write", at=3), pytest.raises(kind, match=message):
        save_hf(model, tmp_path / "out", group=world, max_file_bytes=3000)
    world.all_gather_object(None)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@contextmanager
def _interrupted(owner, name, *, at):
    """Ctrl-C on the last rank, before a call of a function; the signal of a worker is ignored."""
    seen, real = [], getattr(owner, name)

    def call(*arguments):
        seen.append(1)
        if len(seen) == at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with patch.object(owner, name, call):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("fault", ["cut short", "deleted"])
def test_a_file_that_changes_while_it_is_read(tmp_path, fault):
    reference, real, seen = pretrained(tmp_path), TensorFile.read, []
    file = tmp_path / "model.safetensors"

    def read(*arguments):
        seen.append(1)
        if len(seen) == 4:
            file.unlink() if fault == "deleted" else os.truncate(file, 4000)
        return real(*arguments)

    model = Decoder(DecoderSpec.from_hf(tmp_path))
    with patch.object(TensorFile, "read", read):
        if fault == "cut short":
            with pytest.raises(ValueError, match=r"model\.safetensors is cut short: it ends"):
                load_hf(model, tmp_path)
        else:  # it is open, and read to its end
            load_hf(model, tmp_path)
            assert_same(model.state_dict(), reference)
    with pytest.raises(ValueError, match=r"model\.safetensors is (missing|damaged or cut short)"):
        verify(tmp_path)


def test_a_damaged_copy_of_a_tokenizer_leaves_nothing(tmp_path):
    """A file that ``like`` has cannot be read: nothing appears."""
    model = pretrained(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")

    def failing(*_):
        raise OSError(5, "Input/output error")

    with (
        patch("pathlib.Path.read_bytes", failing),
        pytest.raises(OSError, match="Input/output error"),
    ):
        save_hf(model, tmp_path / "out", like=tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert torch.equal(model.lm_head.weight, tiny_model().lm_head.weight)
