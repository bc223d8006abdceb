"""Many ranks write into one folder, which appears whole or not at all."""

import os
import random
import warnings

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.commit import Draft
from megablocks_core.ckpt.local_place import LocalPlace
from megablocks_core.ckpt.stored import Stored
from megablocks_core.ckpt.writing import FileToWrite, Item
from megablocks_core.files import create_file, replace_file, sync_folder
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
    stored = Stored(LocalPlace(tmp_path / "run" / "a"))
    assert torch.equal(stored.tensors["x/x"][...], expected.float())
    assert torch.equal(stored.tensors["x/x"][(slice(1, 3), slice(1, 2))], expected[1:3, 1:2])
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


_BLOCK = 256
_SAVES = 4


def _state(step):
    return {"x": torch.full((150,), float(step)), "y": torch.full((9,), step), "step": step}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Calls of some saves that prune, and how many had been made when each save returned."""
    root, returned = tmp_path_factory.mktemp("recorded"), []
    with pytest.MonkeyPatch.context() as patch:
        for module in ("manifest", "manifest_reading", "writing", "commit", "stored"):
            patch.setattr(f"megablocks_core.ckpt.{module}.BLOCK_BYTES", _BLOCK)
        recorder = Recorder(root)
        with pytest.MonkeyPatch.context() as stand_ins:
            recorder.install(stand_ins)
            for step in range(1, _SAVES + 1):
                ckpt.save(root / "run" / f"step-{step}", _state(step), keep_last=2)
                returned.append(len(recorder.calls))
        yield recorder, returned


@pytest.mark.parametrize("mode", ["all lost", "all kept", *range(4)])
def test_after_a_crash_at_any_call_the_last_durable_checkpoint_loads(recorded, tmp_path, mode):
    _check_crashes(*recorded, tmp_path, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", range(4, 64))
def test_after_a_crash_at_any_call_whatever_was_lost(recorded, tmp_path, mode):
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
        if durable == 0 and state["step"] == 0:
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
