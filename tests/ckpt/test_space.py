"""A checkpoint that does not fit is refused before anything is written."""

import os

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.local_place import LocalPlace
from megablocks_core.ckpt.space import check_space
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
