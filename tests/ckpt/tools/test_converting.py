"""DCP to ours and back: what torch saved on any number of ranks trains on as it would have."""

import json

import pytest
import torch
import torch.distributed as dist

from megablocks_core import ckpt
from megablocks_core.ckpt.tools.checkpoint import read_whole
from megablocks_core.ckpt.tools.converting import convert
from megablocks_core.ckpt.tools.opening import open_checkpoint
from megablocks_core.groups import Group
from megablocks_core.testing import ranks
from tests.ckpt.tools.saves import RUN, assert_equal, save_dcp, save_ours, state_of, step, trained


@ranks(1, 2, 4)
def test_what_torch_saved_under_fsdp_goes_on_with_ours(tmp_path):
    world = Group.of(dist.group.WORLD)
    model, optimizer = trained(cut=True)
    save_dcp(tmp_path / "dcp", model, optimizer)
    if world.rank == 0:
        assert convert(tmp_path / "dcp", tmp_path / "ours") == []
        ckpt.verify(tmp_path / "ours")
    dist.barrier()
    other, its = trained(3, seed=1, cut=True)
    state = state_of(other, its, step=0)
    ckpt.load(tmp_path / "ours", state, group=world)
    assert state["step"] == 7 and state["run"] == {key: RUN[key] for key in ("versions", "spec")}
    for number in (2, 3):
        step(model, optimizer, number)
        step(other, its, number)
    assert_equal(model, other)


@ranks(1, 2)
def test_plain_tensors(tmp_path):
    model, optimizer = trained()
    save_dcp(tmp_path / "dcp", model, optimizer, ema=torch.arange(5).bfloat16())
    if dist.get_rank() == 0:
        convert(tmp_path / "dcp", tmp_path / "ours")
        other, its = trained(3, seed=1)
        state = {**state_of(other, its), "ema": torch.zeros(5).bfloat16()}
        ckpt.load(tmp_path / "ours", state)
        assert torch.equal(state["ema"], torch.arange(5).bfloat16())
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
            assert all(
                torch.equal(optimizer.state[a][key], its.state[b][key]) for key in its.state[b]
            )


def test_there_and_back_is_the_same_to_the_bit(tmp_path):
    save_ours(tmp_path / "a", big=2**60 + 1, third=1 / 3, odd=torch.tensor([float("nan"), -0.0]))
    convert(tmp_path / "a", tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "b")
    one, other = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert json.dumps(one.state) == json.dumps(other.state)
    assert one.tensors == other.tensors
    for name in one.tensors:
        bits = [read_whole(each, name).reshape(-1).view(torch.uint8) for each in (one, other)]
        assert torch.equal(*bits)


def test_a_target_is_not_overwritten(tmp_path):
    save_ours(tmp_path / "a")
    save_dcp(tmp_path / "dcp", *trained())
    for source in ("a", "dcp"):
        with pytest.raises(ValueError, match="must be new or an empty folder"):
            convert(tmp_path / source, tmp_path / "a")
    ckpt.verify(tmp_path / "a")
