"""Checkpoints in stores: the manifest put last is the commit, whatever listings show."""

import os
import warnings
from contextlib import closing

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.places.places import place_of
from megablocks_core.ckpt.places.store_place import StorePlace
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from tests.ckpt.stores import LateStore

ROOT = "late://bucket/run"


@pytest.fixture
def store():
    LateStore.clear()
    yield LateStore
    LateStore.clear()


def _state(step):
    return {"x": torch.full((300,), float(step)), "y": torch.ones(3), "step": step}


def _load(root=ROOT):
    state = _state(0)
    with warnings.catch_warnings(action="ignore"):
        path = ckpt.load_latest(root, state)
    assert path is None or (state["x"] == state["step"]).all()
    return path and state["step"]


def test_the_manifest_is_put_after_all_others_and_latest_after_it(store):
    ckpt.save(f"{ROOT}/step-1", _state(1))
    files = [call.replace("/bucket/run/", "") for call in store.calls]
    assert files == [
        "put .step-1.partial",
        "put step-1/x.safetensors",
        "put step-1/y.safetensors",
        "put step-1/manifest.json",
        "put LATEST",
        "delete .step-1.partial",
    ]
    ckpt.verify(f"{ROOT}/step-1")


@pytest.mark.parametrize("settled", [True, False])
def test_what_is_listed_late_is_found_through_latest(store, settled):
    assert _load() is None
    for step in (1, 2):
        ckpt.save(f"{ROOT}/step-{step}", _state(step))
        if settled:
            store.settle()
        assert ckpt.latest(ROOT) == f"{ROOT}/step-{step}"
        assert _load() == step


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("settled", [True, False])
def test_a_fault_at_any_call_leaves_the_last_checkpoint(store, settled, arrives):
    ckpt.save(f"{ROOT}/step-1", _state(1))
    calls = len(store.calls)
    for number in range(1, calls + 1):
        store.clear()
        ckpt.save(f"{ROOT}/step-1", _state(1))
        store.settle()
        store.fails_at, store.arrives = calls + number, arrives
        is_saved = False
        try:
            ckpt.save(f"{ROOT}/step-2", _state(2))
            is_saved = True
        except OSError:
            assert _load() == 1
        assert is_saved == (number == calls)  # all was well but for the deletion of the mark
        store.settle()
        assert _load() == 1 + is_saved
        ckpt.save(f"{ROOT}/step-{2 + is_saved}", _state(3))
        if settled:
            store.settle()
        assert _load() == 3


def test_what_a_killed_save_leaves_is_no_checkpoint_and_makes_room(store):
    ckpt.save(f"{ROOT}/step-1", _state(1))
    store.settle()
    draft = place_of(ROOT).draft("step-2")
    draft.staging.put("x.safetensors", b"x" * 99)
    store.settle()
    with pytest.warns(match="is left of a save that did not finish, or of a removal"):
        assert ckpt.latest(ROOT) == f"{ROOT}/step-1"
    ckpt.save(f"{ROOT}/step-2", _state(2))
    store.settle()
    assert _load() == 2
    assert [name for name in store.store if "partial" in name] == []


def test_leftovers_are_pruned_and_whole_ones_stay(store):
    for step in (1, 2, 3):
        ckpt.save(f"{ROOT}/step-{step}", _state(step))
    place_of(ROOT).draft("step-4").staging.put("x.safetensors", b"x")
    place_of(ROOT).put(".step-3.partial", b"partial")
    store.settle()
    removed = ckpt.prune(ROOT, keep_last=1, leftovers=True)
    assert {str(one).rpartition("/")[2] for one in removed} == {
        ".step-3.partial", ".step-4.partial", "step-1", "step-2",
    }  # fmt: skip
    left = {name.removeprefix("/bucket/run/") for name in store.store}
    files = ("x.safetensors", "y.safetensors", "manifest.json")
    assert left == {"LATEST", *(f"step-3/{name}" for name in files)}
    assert _load() == 3


def test_a_full_folder_is_refused_even_when_it_is_not_listed(store):
    ckpt.save(f"{ROOT}/step-1", _state(1))
    for _ in range(2):
        with pytest.raises(ValueError, match="must be new or an empty folder"):
            ckpt.save(f"{ROOT}/step-1", _state(2))
        store.settle()
    place_of(f"{ROOT}/other").put("x", b"x")
    store.settle()
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        ckpt.save(f"{ROOT}/other", _state(2))
    assert _load() == 1


def test_damage_is_found(store):
    ckpt.save(f"{ROOT}/step-1", _state(1))
    store.settle()
    name = "/bucket/run/step-1/x.safetensors"
    for wrong, message in ((b"?" * 4, "is damaged"), (b"", "bytes, .* were written")):
        data = place_of(f"{ROOT}/step-1").read("x.safetensors")
        place_of(f"{ROOT}/step-1").put("x.safetensors", data[:-4] + wrong)
        assert name in store.store
        with pytest.raises(ckpt.CheckpointError, match=f"{ROOT}/step-1/x.safetensors.*{message}"):
            ckpt.verify(f"{ROOT}/step-1")
        with pytest.raises(ckpt.CheckpointError, match=message):
            ckpt.load(f"{ROOT}/step-1", _state(0))


@ranks(1, 2)
def test_many_ranks_through_a_url(tmp_path):
    world = Mesh().group("dp")
    root = f"file://{tmp_path}/run"
    for step in (1, 2):
        ckpt.save(f"{root}/step-{step}", _state(step), group=world)
    state = _state(0)
    assert ckpt.load_latest(root, state, group=world) == f"{root}/step-2"
    assert state["step"] == 2 and (state["x"] == 2).all()
    ckpt.verify(tmp_path / "run" / "step-2")  # the same format
    assert sorted(os.listdir(tmp_path / "run")) == ["LATEST", "step-1", "step-2"]


def test_ranges_are_filled_and_ends_are_seen(store):
    place = StorePlace.of(ROOT)
    sink = place.create("f")
    sink.write([memoryview(b"ab"), memoryview(b"c")], 0)
    sink.write([memoryview(b"de")], 3)
    sink.finish()
    one, two = bytearray(1), bytearray(3)
    with closing(place.open("f")) as source:
        source.read([memoryview(one), memoryview(two)], 1)
        assert bytes(one + two) == b"bcde"
        with pytest.raises(EOFError, match="ends before byte 6"):
            source.read([memoryview(one), memoryview(two)], 2)


def test_fsspec_is_named_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs fsspec.*megablocks-core\[remote\]"):
        ckpt.latest(ROOT)


def test_a_file_in_the_place_of_a_folder(store):
    ckpt.save(f"{ROOT}/step-1", _state(1))
    assert place_of(f"{ROOT}/LATEST").is_file()
    for path in (ROOT, f"{ROOT}/step-1", f"{ROOT}/none", "late://bucket"):
        assert not place_of(path).is_file()
