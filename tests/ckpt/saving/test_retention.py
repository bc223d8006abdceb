"""Old checkpoints go when asked to; the newest whole one and what is none always stay."""

import os
import warnings

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.files import disk
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks


def _steps(root, *steps):
    for step in steps:
        ckpt.save(f"{root}/step-{step}", {"x": torch.full((5,), float(step)), "step": step})


def _left(root):
    return sorted(int(name.removeprefix("step-")) for name in os.listdir(root) if "-" in name)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, [5, 10, 15, 20, 23]),
        ({"keep_last": 1}, [23]),
        ({"keep_last": 2}, [20, 23]),
        ({"keep_last": 9}, [5, 10, 15, 20, 23]),
        ({"keep_every": 10}, [10, 20, 23]),
        ({"keep_last": 3, "keep_every": 10}, [10, 15, 20, 23]),
    ],
)
def test_the_last_ones_and_every_so_many_are_kept(tmp_path, options, left):
    _steps(tmp_path, 5, 10, 15, 20, 23)
    removed = ckpt.prune(tmp_path, **options)
    gone = [step for step in (5, 10, 15, 20, 23) if step not in left]
    assert removed == [tmp_path / f"step-{step}" for step in gone]
    assert _left(tmp_path) == left
    assert ckpt.latest(tmp_path) == tmp_path / "step-23"
    for step in left:
        ckpt.verify(tmp_path / f"step-{step}")


def test_names_without_a_number_are_kept_by_keep_every(tmp_path):
    for name in ("final", "a-3", "b"):
        ckpt.save(tmp_path / name, {"step": 1})
    assert ckpt.prune(tmp_path, keep_every=2) == [tmp_path / "a-3"]
    assert ckpt.prune(tmp_path, keep_last=1) == [tmp_path / "final"]


def test_what_is_not_a_whole_checkpoint_is_neither_counted_nor_deleted(tmp_path):
    _steps(tmp_path, 1, 2, 3)
    path = tmp_path / "step-3" / "x.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "notes").mkdir()
    assert ckpt.prune(tmp_path, keep_last=1) == [tmp_path / "step-1"]
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "notes", "step-2", "step-3"]
    path.unlink()
    (tmp_path / "step-2" / "manifest.json").unlink()
    with pytest.raises(ckpt.CheckpointError, match="no whole checkpoint"):
        ckpt.prune(tmp_path, keep_last=1)
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "notes", "step-2", "step-3"]


def test_links_are_neither_counted_nor_followed(tmp_path):
    _steps(tmp_path, 1, 2, 3)
    (tmp_path / "z-best").symlink_to("step-1")
    (tmp_path / ".a.00000000.partial").symlink_to("step-1")
    assert ckpt.prune(tmp_path, keep_last=2) == [tmp_path / "step-1"]
    (tmp_path / "z-best").unlink()
    (tmp_path / "z-best").symlink_to("step-3")
    (tmp_path / "aaa").symlink_to("step-3")
    with warnings.catch_warnings(action="ignore"):
        assert ckpt.latest(tmp_path) == tmp_path / "step-3"
    assert ckpt.prune(tmp_path, keep_last=1, leftovers=True) == [
        tmp_path / ".a.00000000.partial", tmp_path / "step-2",
    ]  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "aaa", "step-3", "z-best"]
    ckpt.verify(tmp_path / "z-best")


def test_leftovers_go_only_when_named(tmp_path):
    _steps(tmp_path, 1)
    for name in (".step-2.0a1b2c3d.partial", ".step-0.0a1b2c3d.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.safetensors").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    assert ckpt.prune(tmp_path, keep_last=1) == []
    assert len(ckpt.prune(tmp_path, leftovers=True)) == 2
    assert sorted(os.listdir(tmp_path)) == [".git", "LATEST", "step-1"]
    with warnings.catch_warnings(action="error"):
        assert ckpt.latest(tmp_path) == tmp_path / "step-1"


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_every": 0}, {"keep_every": -1}])
def test_counts_below_one_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* must be at least 1"):
        ckpt.prune(tmp_path, **options)


@pytest.mark.parametrize("count", [float("nan"), 1.5, 2.0, True, "1", [1]])
@pytest.mark.parametrize("name", ["keep_last", "keep_every"])
def test_what_is_no_count_deletes_nothing(tmp_path, name, count):
    _steps(tmp_path, 1, 2, 3)
    with pytest.raises(ValueError, match=f"{name}=.* must be an int"):
        ckpt.prune(tmp_path, **{name: count})
    with pytest.raises(ValueError, match=f"{name}=.* must be an int"):
        ckpt.save(tmp_path / "step-4", {"step": 4}, **{name: count})
    assert _left(tmp_path) == [1, 2, 3]


@ranks(2)
def test_one_rank_deletes_and_all_know(tmp_path):
    world = Mesh().group("dp")
    if world.rank == 0:
        _steps(tmp_path, 1, 2)
    world.barrier()
    assert ckpt.prune(tmp_path, keep_last=1, group=world) == [tmp_path / "step-1"]
    assert _left(tmp_path) == [2]


@pytest.mark.parametrize("call", ["rename", "sync", "remove_file", "remove_folder"])
def test_a_removal_that_fails_leaves_no_part_under_the_name(tmp_path, monkeypatch, call):
    _steps(tmp_path, 1, 2)

    def failing(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, call, failing)
        with pytest.raises(OSError, match="Input/output error"):
            ckpt.prune(tmp_path, keep_last=1)
    if (tmp_path / "step-1").exists():
        ckpt.verify(tmp_path / "step-1")
    ckpt.verify(tmp_path / "step-2")
    ckpt.prune(tmp_path, keep_last=1, leftovers=True)
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "step-2"]


@ranks(1, 2)
def test_a_save_prunes_once_it_is_durable(tmp_path):
    world = Mesh().group("dp")
    for step in range(1, 8):
        state = {"x": torch.ones(3), "step": step}
        ckpt.save(tmp_path / f"step-{step}", state, group=world, keep_last=2, keep_every=3)
    assert _left(tmp_path) == [3, 6, 7]
    with pytest.raises(ValueError, match="keep_last=0"):
        ckpt.save(tmp_path / "step-8", {}, group=world, keep_last=0)


def test_a_save_whose_pruning_fails_is_saved_and_says_so(tmp_path, monkeypatch):
    _steps(tmp_path, 1)

    def failing(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk, "remove_file", failing)
    with pytest.warns(match="step-2.*saved, but pruning failed: .*Input/output error"):
        ckpt.save(tmp_path / "step-2", {"step": 2}, keep_last=1)
    ckpt.verify(tmp_path / "step-2")


def test_a_save_that_fails_prunes_nothing(tmp_path, monkeypatch):
    _steps(tmp_path, 1, 2)

    def failing(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk, "replace", failing)
    with pytest.raises(OSError, match="Input/output error"):
        ckpt.save(tmp_path / "step-3", {"step": 3}, keep_last=1)
    assert _left(tmp_path) == [1, 2]
