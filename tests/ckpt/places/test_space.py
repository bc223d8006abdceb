"""A checkpoint that does not fit is refused before anything is written."""

import os
import resource
import signal
import subprocess

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.places.space import check_space
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks


def test_what_fits_exactly_is_let_through(tmp_path, monkeypatch):
    for free in (1000, None):
        monkeypatch.setattr(LocalPlace, "free_bytes", lambda _, free=free: free)
        check_space(LocalPlace(tmp_path), 1000)
    monkeypatch.setattr(LocalPlace, "free_bytes", lambda _: 999)
    with pytest.raises(OSError, match="No space left: 1000 bytes to write, 999 are free"):
        check_space(LocalPlace(tmp_path), 1000)


@ranks(1, 2)
def test_the_files_of_all_ranks_are_counted(tmp_path):
    world = Mesh().group("dp")
    ckpt.save(tmp_path / "step-1", {"x": torch.ones(10)}, group=world)
    before = sorted(os.listdir(tmp_path))
    state = {"x": torch.ones(1000), "y": torch.ones(1000, dtype=torch.float64)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalPlace, "free_bytes", lambda _: 12_000)
        error = OSError if world.rank == 0 else ckpt.CheckpointError
        with pytest.raises(error, match="No space left"):
            ckpt.save(tmp_path / "step-2", state, group=world)
        world.barrier()
        assert sorted(os.listdir(tmp_path)) == before
        patch.setattr(LocalPlace, "free_bytes", lambda _: 12_500)
        ckpt.save(tmp_path / "step-2", state, group=world)


def _listing(root):
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


@ranks(1, 2)
def test_a_disk_that_fills_up_raises_on_all_ranks_and_leaves_the_old_checkpoint(tmp_path):
    world = Mesh().group("dp")
    root = tmp_path / "run"
    if world.rank == 0:
        _mount_small_disk(root)
    world.barrier()
    try:
        ckpt.save(root / "step-1", {"x": torch.ones(1000), "step": 1}, group=world)
        world.barrier()
        before = _listing(root)
        for fits in (0, 1):  # the first file does not fit, or the second
            state = {"x": torch.ones(1000 + 10**6 * (1 - fits)), "y": torch.ones(10**6)}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LocalPlace, "free_bytes", lambda _: None)
                with pytest.raises((OSError, ckpt.CheckpointError), match="No space left"):
                    ckpt.save(root / "step-2", state, group=world)
            world.barrier()
            assert _listing(root) == before
        state = {"x": torch.zeros(1000), "step": 0}
        assert ckpt.load_latest(root, state, group=world) == root / "step-1"
        assert state["step"] == 1 and state["x"].sum() == 1000
        ckpt.save(root / "step-2", {"x": torch.ones(10)}, group=world)
    finally:
        world.barrier()
        if world.rank == 0:
            subprocess.run(["umount", root], check=True)


def test_a_limit_at_any_byte_leaves_the_old_checkpoint(tmp_path):
    ckpt.save(tmp_path / "step-1", {"step": 1})
    before = _listing(tmp_path)
    state = {"x": torch.ones(500), "step": 2}
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (0, 1, 20, 60, 500, 1000, 2050):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
            with pytest.raises(OSError):
                ckpt.save(tmp_path / "step-2", state)
            assert _listing(tmp_path) == before, limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    ckpt.save(tmp_path / "step-2", state)
    assert ckpt.latest(tmp_path) == tmp_path / "step-2"


def _mount_small_disk(root):
    root.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", root], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a small disk needs root: {done.stderr.decode()}")
