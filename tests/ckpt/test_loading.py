"""What does not fit or is damaged is named, and nothing is changed before it is known."""

import pytest
import torch
from torch import nn

from megablocks_core import ckpt
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks


def test_f_161_missing_unexpected_and_misshaped_names_are_listed(tmp_path):
    ckpt.save(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(3)})
    state = {"a": torch.zeros(2), "c": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"lacks c; state lacks b$"):
        ckpt.load(tmp_path / "c", state)
    with pytest.raises(ValueError, match=r"state lacks b$"):
        ckpt.load(tmp_path / "c", {"a": state["a"]})
    with pytest.raises(ValueError, match=r"a/a has shape \(3,\), saved with \(2,\)"):
        ckpt.load(tmp_path / "c", {"a": torch.zeros(3), "b": torch.zeros(3)}, strict=False)
    assert state["a"].sum() == 0
    assert ckpt.load(tmp_path / "c", state, strict=False) == (["c"], ["b"])
    assert state["a"].sum() == 2


def test_a_model_of_another_size_names_three_tensors(tmp_path):
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(5)]
    ckpt.save(tmp_path / "c", {"model": torch.nn.Sequential(*layers)})
    wider = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(5)))
    with pytest.raises(ValueError, match="2.weight has shape .*; and 2 more$"):
        ckpt.load(tmp_path / "c", {"model": wider})


def test_f_161_inside_a_module_too(tmp_path):
    ckpt.save(tmp_path / "c", {"model": nn.Linear(2, 3)})
    layer = nn.Linear(2, 3, bias=False)
    net, before = nn.Sequential(layer), layer.weight.detach().clone()
    with pytest.raises(ValueError) as caught:
        ckpt.load(tmp_path / "c", {"model": net})
    for part in ("lacks model/0.weight", "state lacks model/weight, model/bias"):
        assert part in str(caught.value)
    assert torch.equal(layer.weight, before)


def test_casts_are_never_silent(tmp_path):
    ckpt.save(tmp_path / "c", {"model": nn.Linear(2, 3)})
    with pytest.raises(ValueError, match=r"model/bias has dtype torch.bfloat16, saved with"):
        ckpt.load(tmp_path / "c", {"model": nn.Linear(2, 3).bfloat16()})


def test_kinds_meta_and_parameter_groups_must_fit(tmp_path):
    net = nn.Linear(2, 3)
    ckpt.save(tmp_path / "c", {"model": net, "optimizer": torch.optim.SGD(net.parameters())})
    other = torch.optim.SGD([net.bias])
    split = torch.optim.SGD([{"params": [net.bias]}, {"params": [net.weight]}])
    for state, message in (
        ({"model": 1}, "model is a json, saved as a module"),
        ({"model": nn.Linear(2, 3, device="meta")}, "model/weight is on meta"),
        ({"model": net, "optimizer": split}, "optimizer has two parameter groups, 0 and 1, of"),
    ):
        with pytest.raises(ValueError, match=message):
            ckpt.load(tmp_path / "c", state, strict=False)
    state = {"model": net, "optimizer": other}
    assert ckpt.load(tmp_path / "c", state, strict=False).unexpected == ["optimizer/model/weight"]
    with pytest.raises(ValueError, match="state lacks optimizer/model/weight$"):
        ckpt.load(tmp_path / "c", state)
    ckpt.save(tmp_path / "d", {"model": net, "optimizer": split})
    joined = torch.optim.SGD(net.parameters())
    with pytest.raises(ValueError, match="one parameter group, 0, of what was saved as several"):
        ckpt.load(tmp_path / "d", {"model": net, "optimizer": joined})


def test_a_tied_parameter_loads_under_either_name(tmp_path):
    plain, first, second = (nn.Linear(2, 2, bias=False) for _ in range(3))
    second.weight = first.weight
    ckpt.save(tmp_path / "c", {"model": nn.ModuleDict({"a": plain})})
    ckpt.load(tmp_path / "c", {"model": nn.ModuleDict({"b": first, "a": second})})
    assert torch.equal(first.weight, plain.weight)


def test_many_blocks_and_small_tensors_beside_them(tmp_path):
    state = {
        "model": nn.ParameterDict(
            {str(n): nn.Parameter(torch.randn(n % 7 * 300_000 + 5)) for n in range(20)}
        )
    }
    ckpt.save(tmp_path / "c", state)
    again = {
        "model": nn.ParameterDict(
            {name: nn.Parameter(torch.zeros_like(value)) for name, value in state["model"].items()}
        )
    }
    ckpt.load(tmp_path / "c", again)
    for name, value in state["model"].items():
        assert torch.equal(again["model"][name], value)


@ranks(2)
def test_damage_that_one_rank_reads_raises_on_all(tmp_path):
    world = Mesh().group("dp")
    ckpt.save(tmp_path / "c", {"x": torch.ones(9), "y": torch.ones(2)}, group=world)
    if world.rank == 0:
        data = bytearray((tmp_path / "c" / "x.safetensors").read_bytes())
        data[-1] ^= 1
        (tmp_path / "c" / "x.safetensors").write_bytes(data)
    world.barrier()
    state = {"y": torch.zeros(2)} | ({"x": torch.zeros(9)} if world.rank == 1 else {})
    with pytest.raises(ckpt.CheckpointError, match="x.safetensors is damaged: block 0"):
        ckpt.load(tmp_path / "c", state, group=world, strict=False)


@ranks(2)
def test_ranks_that_see_different_checkpoints_are_refused(tmp_path):
    world = Mesh().group("dp")
    mine = tmp_path / str(world.rank) / "c"
    ckpt.save(mine, {"step": world.rank})
    with pytest.raises(ckpt.CheckpointError, match="ranks see different checkpoints"):
        ckpt.load(mine, {"step": 0}, group=world)
