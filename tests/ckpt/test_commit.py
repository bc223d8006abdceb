"""Many ranks write into one folder, which appears whole or not at all."""

import os

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.commit import Draft
from megablocks_core.ckpt.places import LocalPlace
from megablocks_core.ckpt.stored import Stored
from megablocks_core.ckpt.writing import FileToWrite, Item
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks


@ranks(1, 2, 4)
def test_what_each_rank_writes_is_one_checkpoint(tmp_path):
    world = Mesh().group("dp")
    mine = torch.full((2, 3), float(world.rank))
    whole = (2 * world.size, 3)
    item = Item("x", "x/x", mine.dtype, (2 * world.rank, 0), (2, 3), whole)
    draft = Draft(tmp_path / "run" / "a", group=world)
    try:
        draft.open()
        writer = draft.writer([FileToWrite(f"x.{world.rank:05}.safetensors", [item])])
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
    draft = Draft(tmp_path / str(world.rank) / "a", group=world)
    with pytest.raises(ckpt.CheckpointError, match="must lie on storage that all ranks share"):
        draft.open()
    draft.discard()
    world.barrier()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@ranks(2)
def test_a_draft_that_is_not_committed_leaves_nothing(tmp_path):
    world = Mesh().group("dp")
    draft = Draft(tmp_path / "a", group=world)
    draft.open()
    draft.writer([FileToWrite(f"{world.rank}", [])])
    world.barrier()
    draft.discard()
    world.barrier()
    assert os.listdir(tmp_path) == []
