"""A checkpoint of ours is read box by box, however it was cut when written."""

import json

import pytest
import torch
import torch.distributed as dist

from megablocks_core import ckpt
from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.places.places import place_of
from megablocks_core.ckpt.tools.checkpoint import read_whole
from megablocks_core.ckpt.tools.own import OwnCheckpoint
from megablocks_core.groups import Group
from megablocks_core.testing import ranks
from tests.ckpt.tools.saves import state_of, trained


def test_any_box_of_a_tensor(tmp_path):
    values = torch.arange(4.0 * 5 * 6).reshape(4, 5, 6)
    ckpt.save(tmp_path / "c", {"x": values, "one": torch.tensor(3)})
    opened = OwnCheckpoint(place_of(tmp_path / "c"))
    for box in ((1, 3), (0, 5), (0, 6)), ((0, 4), (2, 3), (1, 5)), ((2, 3), (4, 5), (0, 1)):
        slices = tuple(slice(*ends) for ends in box)
        assert torch.equal(opened.read("x/x", slices), values[slices])
    assert opened.read("one/one", ()) == 3


@ranks(2, 4)
def test_what_ranks_wrote_in_pieces_is_whole(tmp_path):
    world = Group.of(dist.group.WORLD)
    model, optimizer = trained(cut=True)
    ckpt.save(tmp_path / "c", state_of(model, optimizer), group=world)
    if world.rank == 0:
        opened = OwnCheckpoint(place_of(tmp_path / "c"))
        chunks = opened.manifest.tensors["optimizer/model/0.weight/exp_avg"].chunks
        assert len(chunks) == world.size
    full = optimizer.state[model[0].weight]["exp_avg"].full_tensor()
    if world.rank == 0:
        assert torch.equal(read_whole(opened, "optimizer/model/0.weight/exp_avg"), full)
        half = (slice(2, 9), slice(1, 4))
        assert torch.equal(opened.read("optimizer/model/0.weight/exp_avg", half), full[half])


def test_damage_is_found_when_it_is_read(tmp_path):
    ckpt.save(tmp_path / "c", {"x": torch.ones(9)})
    path = tmp_path / "c" / "x.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        read_whole(OwnCheckpoint(place_of(tmp_path / "c")), "x/x")


def test_files_beside_the_tensors(tmp_path):
    ckpt.save(tmp_path / "c", {"x": torch.ones(2)}, files={"config.json": {"a": 1}})
    beside = OwnCheckpoint(place_of(tmp_path / "c")).beside()
    assert {name: json.loads(data) for name, data in beside.items()} == {"config.json": {"a": 1}}
