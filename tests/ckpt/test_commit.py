"""Many ranks write into one folder, which appears whole or not at all."""

import os

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.commit import Draft
from megablocks_core.ckpt.local_place import LocalPlace
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
