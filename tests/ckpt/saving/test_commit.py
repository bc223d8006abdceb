"""Many ranks write into one folder, which appears whole or not at all."""

import os
import random
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from datetime import timedelta

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.format.writing import FileToWrite, Item
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.saving.commit import Draft
from megablocks_core.files import create_file, disk, replace_file, sync_folder
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from tests.ckpt.crashes import Recorder


@ranks(1, 2, 4)
def test_what_each_rank_writes_is_one_checkpoint(tmp_path):
    world = Mesh().group("dp")
    mine = torch.full((2, 3), float(world.rank))
    whole = (2 * world.size, 3)
    item = Item("x", "x/x", mine.dtype, (2 * world.rank, 0), (2, 3), whole)
    draft = Draft(tmp_path / "run" / "a", group=world)
    try:
        writer = draft.open([FileToWrite(f"x.{world.rank:05}.safetensors", [item])])
        writer.add(f"x.{world.rank:05}.safetensors", "x", mine)
        receipt = writer.finish()
        draft.commit({"x": {"kind": "tensor"}}, receipt, files={"config.json": b"{}"})
    finally:
        draft.discard()
    expected = torch.arange(world.size).repeat_interleave(2)[:, None].expand(-1, 3)
    state = {"x": torch.zeros(whole)}
    ckpt.load(tmp_path / "run" / "a", state)
    assert torch.equal(state["x"], expected.float())
    ckpt.verify(tmp_path / "run" / "a")
    assert (tmp_path / "run" / "a" / "config.json").read_bytes() == b"{}"
    assert ckpt.latest(tmp_path / "run") == tmp_path / "run" / "a"


@ranks(2)
def test_a_folder_that_a_rank_does_not_see_is_refused(tmp_path):
    world = Mesh().group("dp")
    draft = Draft(tmp_path / "a", group=world)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(LocalPlace, "is_there", lambda _: False)
        with pytest.raises(ckpt.CheckpointError, match="must lie on storage that all ranks share"):
            draft.open([])
    draft.discard()
    world.barrier()
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_other_paths_are_refused(tmp_path):
    world = Mesh().group("dp")
    draft = Draft(tmp_path / str(world.rank), group=world)
    with pytest.raises(ValueError, match="path must be the same on all ranks, not .*0.*1"):
        draft.open([])
    draft.discard()
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_what_the_first_rank_does_not_see_is_not_committed(tmp_path):
    world = Mesh().group("dp")
    draft = Draft(tmp_path / "a", group=world)
    writer = draft.open([FileToWrite(f"{world.rank}", [])])
    receipt = writer.finish()
    world.barrier()
    if world.rank == 0:
        (path,) = tmp_path.glob(".a.*/1")
        path.write_bytes(b"")
    message = "1 has 0 bytes, .* were written"
    with pytest.raises(ckpt.CheckpointError, match=message):
        draft.commit({}, receipt)
    draft.discard()
    world.barrier()
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_a_draft_that_is_not_committed_leaves_nothing(tmp_path):
    world = Mesh().group("dp")
    draft = Draft(tmp_path / "a", group=world)
    draft.open([FileToWrite(f"{world.rank}", [])])
    world.barrier()
    draft.discard()
    world.barrier()
    assert os.listdir(tmp_path) == []


_SAVES = 4


def _state(step):
    return {"x": torch.full((150,), float(step)), "y": torch.full((9,), step), "step": step}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Calls of some saves that prune, and how many had been made when each save returned."""
    root, returned = tmp_path_factory.mktemp("recorded"), []
    recorder = Recorder(root)
    with pytest.MonkeyPatch.context() as patch:
        _small_blocks(patch)
        recorder.install(patch)
        for step in range(1, _SAVES + 1):
            ckpt.save(root / "run" / f"step-{step}", _state(step), keep_last=2)
            returned.append(len(recorder.calls))
    return recorder, returned


def _small_blocks(patch):
    for name, module in list(sys.modules.items()):
        if name.startswith("megablocks_core.ckpt.") and hasattr(module, "BLOCK_BYTES"):
            patch.setattr(module, "BLOCK_BYTES", 256)


@pytest.mark.parametrize("mode", ["all lost", "all kept", *range(4)])
def test_after_a_crash_at_any_call_the_last_durable_checkpoint_loads(
    recorded, tmp_path, monkeypatch, mode
):
    _small_blocks(monkeypatch)
    _check_crashes(*recorded, tmp_path, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", range(4, 64))
def test_after_a_crash_at_any_call_whatever_was_lost(recorded, tmp_path, monkeypatch, mode):
    _small_blocks(monkeypatch)
    _check_crashes(*recorded, tmp_path, mode)


def _check_crashes(recorder, returned, folder, mode):
    chosen = random.Random(mode)
    always = {"all lost": False, "all kept": True}
    for stop in range(len(recorder.calls) + 1):
        after = folder / str(stop)
        recorder.replay(stop, lambda _: always.get(mode, chosen.random() < 0.5), after)
        durable = sum(calls <= stop for calls in returned)
        state = _state(0)
        with warnings.catch_warnings(action="ignore"):
            try:
                path = ckpt.load_latest(after / "run", state)
            except ckpt.CheckpointError:
                assert durable == 0, stop
                continue
        if path is None:
            assert durable == 0, stop
            continue
        assert state["step"] in (durable, durable + 1), stop
        assert all(torch.equal(state[name], _state(state["step"])[name]) for name in "xy")
        if stop % 5:
            continue
        ckpt.save(after / "run" / "step-next", _state(9), keep_last=1)
        assert ckpt.prune(after / "run", leftovers=True) is not None
        assert sorted(os.listdir(after / "run")) == ["LATEST", "step-next"]


def test_the_recorder_loses_what_was_not_synced(tmp_path, monkeypatch):
    """The model itself: without the sync of a file, a folder or a rename, something is lost."""
    (tmp_path / "a").mkdir()
    recorder = Recorder(tmp_path / "a")
    recorder.install(monkeypatch)
    create_file(tmp_path / "a" / "f", b"one")
    before = len(recorder.calls)
    sync_folder(tmp_path / "a")
    replace_file(tmp_path / "a" / "f", b"two")
    assert recorder.calls[:4] == ["create f", "write f", "sync f", "sync a"]

    def left(stop, survives):
        into = tmp_path / f"{stop}{survives}"
        recorder.replay(stop, lambda _: survives, into)
        return {path.name: path.read_bytes() for path in into.iterdir()}

    assert left(before, False) == {} and left(before, True) == {"f": b"one"}
    assert left(before + 1, False) == {"f": b"one"}
    end = len(recorder.calls)
    assert recorder.calls[-2].startswith("replace")
    assert left(end - 1, False) == {"f": b"one"} and left(end - 1, True) == {"f": b"two"}
    assert left(end, False) == {"f": b"two"}


def _listing(root):
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


_EIO = OSError(5, "Input/output error")


class _Fault:
    """Makes call ``number`` of a function of ``files.disk`` fail, on the rank that this is on."""

    def __init__(self, patch, call, number, kind):
        self.real, self.number, self.kind, self.seen = getattr(disk, call), number, kind, 0
        patch.setattr(disk, call, self)

    def __call__(self, *args, **options):
        self.seen += 1
        if self.seen != self.number:
            return self.real(*args, **options)
        if self.kind == "slow":
            time.sleep(0.3)
            return self.real(*args, **options)
        if self.kind == "half":  # a part arrives before the disk is full
            descriptor, (part, *_), offset = args
            self.real(descriptor, [part[: part.nbytes // 2]], offset)
        raise OSError(28, "No space left on device") if self.kind == "half" else _EIO


_FAULTS = [
    *((call, "fails") for call in ("create", "write", "sync", "rename", "replace", "make_folder")),
    ("write", "half"),
]


@ranks(1, 2)
@pytest.mark.parametrize(("call", "kind"), _FAULTS)
def test_a_fault_at_any_call_raises_on_all_ranks_and_loses_nothing(tmp_path, call, kind):
    world = Mesh().group("dp")
    ckpt.save(tmp_path / "step-1", _state(1), group=world)
    world.barrier()
    before = _listing(tmp_path)
    reached = 0
    for rank in range(world.size):
        for number in range(1, 50):
            with pytest.MonkeyPatch.context() as patch:
                fault = _Fault(patch, call, number if world.rank == rank else 0, kind)
                try:
                    ckpt.save(tmp_path / "step-2", _state(2), group=world)
                    failed = False
                except (OSError, ckpt.CheckpointError) as error:
                    assert ("No space" if kind == "half" else "Input/output error") in str(error)
                    failed = True
            outcomes = world.all_gather_object((failed, fault.seen >= number))
            assert {failed for failed, _ in outcomes} == {outcomes[rank][1]}, outcomes
            if not failed:
                break
            reached += 1
            assert _listing(tmp_path) == before
            world.barrier()
        state = _state(0)
        assert ckpt.load_latest(tmp_path, state, group=world) == tmp_path / "step-2"
        assert state["step"] == 2 and (state["x"] == 2).all()
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(tmp_path / "step-2")
            (tmp_path / "LATEST").write_bytes(before["LATEST"])
        world.barrier()
    assert reached >= 1


@ranks(1, 2)
@pytest.mark.parametrize("call", ["write", "sync", "rename"])
def test_a_slow_disk_is_waited_for(tmp_path, call):
    world = Mesh().group("dp")
    with pytest.MonkeyPatch.context() as patch:
        _Fault(patch, call, 1, "slow")
        ckpt.save(tmp_path / "step-1", _state(1), group=world)
    ckpt.verify(tmp_path / "step-1")


@ranks(2)
def test_a_rank_that_is_missing_ends_the_save_within_the_timeout(tmp_path):
    world, hasty = (Mesh(timeout=timedelta(seconds=seconds)).group("dp") for seconds in (60, 2))
    ckpt.save(tmp_path / "step-1", _state(1), group=world)
    world.barrier()
    before = _listing(tmp_path)
    if world.rank == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            ckpt.save(tmp_path / "step-2", _state(2), group=hasty)
        assert time.monotonic() - start < 20
        assert _listing(tmp_path) == before
        assert ckpt.latest(tmp_path) == tmp_path / "step-1"
    else:
        time.sleep(3)


@ranks(2)
def test_a_disk_slower_than_the_timeout_ends_the_save_and_training_goes_on(tmp_path):
    world, hasty = (Mesh(timeout=timedelta(seconds=seconds)).group("dp") for seconds in (60, 2))
    ckpt.save(tmp_path / "step-1", _state(1), group=world)
    world.barrier()
    before = _listing(tmp_path)
    real = disk.sync
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(disk, "sync", lambda file: (time.sleep(4), real(file)))
        with pytest.raises((RuntimeError, OSError)):
            ckpt.save(tmp_path / "step-2", {"x": torch.ones(9), "y": torch.ones(9)}, group=hasty)
    assert world.all_reduce(torch.ones(1)).item() == 2
    assert _listing(tmp_path) == before
    ckpt.save(tmp_path / "step-2", _state(2), group=world)


# Saves and prunes over and over until it is killed; each save that returned leaves a dot.
_SAVE_UNTIL_KILLED = """
    import itertools, os, random, signal, sys, time, warnings, torch
    from megablocks_core import ckpt

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = random.Random(sys.argv[2])
    for number in range(int(sys.argv[2])):
        root = os.path.join(sys.argv[1], str(number))
        os.mkdir(root)
        if not (child := os.fork()):
            for step in itertools.count(1):
                state = {"x": torch.full((200_000,), float(step)), "step": step}
                ckpt.save(f"{root}/step-{step}", state, keep_last=1)
                with open(f"{root}/durable", "ab") as file:
                    file.write(b".")
        while not os.path.exists(f"{root}/durable"):
            time.sleep(0.001)
        time.sleep(chosen.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.wait()
"""


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.drill)])
def test_sigkill_at_any_moment_leaves_a_whole_latest_checkpoint(tmp_path, kills):
    command = [sys.executable, "-c", textwrap.dedent(_SAVE_UNTIL_KILLED), tmp_path, str(kills)]
    subprocess.run(command, check=True, timeout=300)
    left = 0
    for root in tmp_path.iterdir():
        durable = len((root / "durable").read_bytes())
        state = {"x": torch.zeros(200_000), "step": 0}
        with warnings.catch_warnings(action="ignore"):
            path = ckpt.load_latest(root, state)
            assert path == root / f"step-{state['step']}"
            ckpt.verify(path)
            assert state["step"] in (durable, durable + 1)
            assert (state["x"] == state["step"]).all()
            ckpt.save(root / "next", state, keep_last=1)
        left += len(ckpt.prune(root, leftovers=True))
        assert sorted(path.name for path in root.iterdir()) == ["LATEST", "durable", "next"]
    assert left, "no save was killed in the middle"
