"""The newest whole checkpoint is found, whatever a crash left beside it."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.format.manifest_reading import read_manifest
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.places.places import place_of
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks


def _steps(root, *steps):
    for step in steps:
        ckpt.save(root / f"step-{step}", {"x": torch.full((5,), float(step)), "step": step})


def _load(root, group=None):
    state = {"x": torch.zeros(5), "step": 0}
    path = ckpt.load_latest(root, state, **({"group": group} if group else {}))
    assert path is not None and (state["x"] == state["step"]).all()
    return Path(path).name


def test_nothing_yet_is_none(tmp_path):
    assert ckpt.latest(tmp_path / "run") is None
    assert ckpt.latest(tmp_path) is None
    assert ckpt.load_latest(tmp_path, {}) is None


def test_the_last_saved_is_the_newest_whatever_its_name(tmp_path):
    _steps(tmp_path, 2, 10, 1)
    with warnings.catch_warnings(action="error"):
        assert ckpt.latest(tmp_path) == tmp_path / "step-1"
        assert _load(tmp_path) == "step-1"


@ranks(1, 2)
def test_f_152_a_half_written_newest_folder_is_passed_over_by_all_ranks(tmp_path):
    world = Mesh().group("dp")
    if world.rank == 0:
        _steps(tmp_path, 10)
        shutil.copytree(tmp_path / "step-10", tmp_path / "step-20")
        (tmp_path / "step-20" / "manifest.json").unlink()
    world.barrier()
    with (
        pytest.warns(match="passing over .*step-20")
        if world.rank == 0
        else warnings.catch_warnings(action="error")
    ):
        assert ckpt.latest(tmp_path, group=world) == tmp_path / "step-10"
    with (
        pytest.warns(match="passing over .*step-20")
        if world.rank == 0
        else warnings.catch_warnings(action="error")
    ):
        assert _load(tmp_path, world) == "step-10"


@ranks(1, 2)
def test_f_152_a_newest_checkpoint_cut_short_or_damaged_is_passed_over(tmp_path):
    world = Mesh().group("dp")
    path = tmp_path / "step-20" / "x.safetensors"
    if world.rank == 0:
        _steps(tmp_path, 10, 20)
    world.barrier()
    data = path.read_bytes()
    for wrong, why in ((data[:-1], "were written"), (data[:-1] + b"?", "is damaged")):
        world.barrier()
        if world.rank == 0:
            path.write_bytes(wrong)
        world.barrier()
        with (
            pytest.warns(match=why) if world.rank == 0 else warnings.catch_warnings(action="error")
        ):
            assert _load(tmp_path, world) == "step-10"


def test_f_153_folders_without_a_whole_checkpoint_are_an_error(tmp_path):
    (tmp_path / "step-10").mkdir()
    for read in (ckpt.latest, lambda root: ckpt.load_latest(root, {})):
        with pytest.raises(ckpt.CheckpointError, match=r"has the folders \['step-10'\] but no"):
            read(tmp_path)
    shutil.rmtree(tmp_path / "step-10")
    _steps(tmp_path, 10)
    data = (tmp_path / "step-10" / "x.safetensors").read_bytes()
    (tmp_path / "step-10" / "x.safetensors").write_bytes(data[:-1] + b"?")
    with (
        pytest.raises(ckpt.CheckpointError, match="no checkpoint under .* can be read"),
        pytest.warns(),
    ):
        ckpt.load_latest(tmp_path, {"x": torch.zeros(5), "step": 0})


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"step-1", b"0" * 32 + b" step-2"])
def test_f_153_a_torn_or_missing_pointer_does_not_lose_the_run(tmp_path, text):
    _steps(tmp_path, 1, 2)
    (tmp_path / "LATEST").write_bytes(text)
    with pytest.warns(match=r"LATEST.* is torn"):
        assert ckpt.latest(tmp_path) == tmp_path / "step-2"
    (tmp_path / "LATEST").unlink()
    with pytest.warns(match="LATEST cannot be used"):
        assert ckpt.latest(tmp_path) == tmp_path / "step-2"


def test_a_pointer_to_a_folder_that_is_gone_or_older_is_said(tmp_path):
    _steps(tmp_path, 1)
    pointer = (tmp_path / "LATEST").read_bytes()
    _steps(tmp_path, 2)
    current = (tmp_path / "LATEST").read_bytes()
    (tmp_path / "LATEST").write_bytes(pointer)  # killed between rename and LATEST
    with pytest.warns(match="LATEST names 'step-1'"):
        assert ckpt.latest(tmp_path) == tmp_path / "step-2"
    (tmp_path / "LATEST").write_bytes(current)
    shutil.rmtree(tmp_path / "step-2")
    with pytest.warns(match="LATEST names 'step-2'"):
        assert ckpt.latest(tmp_path) == tmp_path / "step-1"


def test_an_unfinished_save_is_said(tmp_path):
    _steps(tmp_path, 1)
    (tmp_path / ".step-2.0a1b2c3d.partial").mkdir()
    with pytest.warns(match="is left of a save that did not finish, or of a removal"):
        assert ckpt.latest(tmp_path) == tmp_path / "step-1"


def test_a_clock_that_steps_back_does_not_hide_the_newest(tmp_path, monkeypatch):
    _steps(tmp_path, 1)
    monkeypatch.setattr("time.time_ns", lambda: 5)
    _steps(tmp_path, 2)
    assert ckpt.latest(tmp_path) == tmp_path / "step-2"


def test_a_cast_is_handed_on(tmp_path):
    ckpt.save(tmp_path / "a", {"x": torch.ones(3)})
    state = {"x": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="dtype"):
        ckpt.load_latest(tmp_path, state)
    assert ckpt.load_latest(tmp_path, state, cast={torch.float32: torch.bfloat16})
    assert state["x"].sum() == 3


def test_a_manifest_that_cannot_be_is_passed_over(tmp_path):
    """Its hash is right, so that only a load sees it."""
    _steps(tmp_path, 1, 2)
    place = place_of(tmp_path / "step-2")
    manifest = read_manifest(place)
    stored = manifest.tensors["x/x"]
    manifest.tensors["x/x"] = replace(stored, shape=(6,))
    place.replace("manifest.json", manifest.text().encode())
    (tmp_path / "LATEST").write_text(f"{manifest.digest} step-2\n")
    with pytest.warns(match="says what cannot be"):
        assert _load(tmp_path) == "step-1"


@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_of_copies_the_one_that_latest_names_counts(tmp_path, name):
    _steps(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / name)
    with warnings.catch_warnings(action="error"):
        assert ckpt.latest(tmp_path) == tmp_path / "step-1"


@ranks(2)
def test_an_error_of_one_rank_that_is_no_damage_is_raised_on_all(tmp_path):
    """A rank that gave up for want of memory is not left behind by others that try an older one."""
    world = Mesh().group("dp")
    for step in (1, 2):
        ckpt.save(tmp_path / f"step-{step}", {"x": torch.ones(5), "step": step}, group=world)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("megablocks_core.ckpt.loading.loading.Wanted", _no_memory)
        with pytest.raises((MemoryError, ckpt.CheckpointError), match="no memory"):
            _load_state(tmp_path, world)
    assert _load_state(tmp_path, world) == 2


def _no_memory(*_, **__):
    raise MemoryError("no memory")


def _load_state(root, group):
    state = {"x": torch.zeros(5), "step": 0}
    ckpt.load_latest(root, state, group=group)
    return state["step"]


@ranks(1, 2)
@pytest.mark.parametrize("fault", [PermissionError, OSError])
def test_a_folder_that_cannot_be_read_is_passed_over(tmp_path, fault):
    """Such as lost+found, which the file system makes and another user owns."""
    world = Mesh().group("dp")
    if world.rank == 0:
        _steps(tmp_path, 1, 2)
        (tmp_path / "lost+found").mkdir()
        (tmp_path / "step-3").mkdir()
    world.barrier()

    def faulty(call, kind):
        def called(place, *arguments):
            if place.path.name == "lost+found" or (place.path.name == "step-3" and kind == "names"):
                raise fault("no permission")
            return call(place, *arguments)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("size", "read", "names"):
            patch.setattr(LocalPlace, kind, faulty(getattr(LocalPlace, kind), kind))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert ckpt.latest(tmp_path, group=world) == tmp_path / "step-2"
            assert _load(tmp_path, world) == "step-2"
            assert ckpt.prune(tmp_path, keep_last=1, group=world) == [tmp_path / "step-1"]
        said = [str(one.message) for one in caught]
        assert sum("lost+found, which cannot be read: no permission" in one for one in said) == (
            0 if world.rank else 2
        )
        assert sum("passing over" in one and "step-3" in one for one in said) == (
            0 if world.rank else 2
        )
    world.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "LATEST", "lost+found", "step-2", "step-3",
    ]  # fmt: skip


def test_a_save_after_one_of_the_last_time_there_can_be_is_the_newest(tmp_path):
    _steps(tmp_path, 1)
    manifest = read_manifest(place_of(tmp_path / "step-1"))
    manifest.saved_unix_ns = 2**63 - 1
    (tmp_path / "step-1" / "manifest.json").write_text(manifest.text())
    (tmp_path / "LATEST").write_text(f"{manifest.digest} step-1\n")
    for step in (3, 2, 0):
        _steps(tmp_path, step)
        with warnings.catch_warnings(action="error"):
            assert ckpt.latest(tmp_path) == tmp_path / f"step-{step}"
            assert _load(tmp_path) == f"step-{step}"
    assert read_manifest(place_of(tmp_path / "step-0")).saved_unix_ns == 2**63 - 1
