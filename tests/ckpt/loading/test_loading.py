"""What does not fit or is damaged is named, and nothing is changed before it is known."""

import pytest
import torch
from torch import nn

from megablocks_core import ckpt
from megablocks_core.ckpt.places.local_place import LocalSource
from megablocks_core.groups import LOCAL, Mesh, ShardSpec, mark
from megablocks_core.testing import ranks


def test_f161_missing_unexpected_and_misshaped_names_are_listed(tmp_path):
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


def test_f161_inside_a_module_too(tmp_path):
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


@ranks(4)
def test_every_byte_is_read_once_in_the_group(tmp_path):
    """Saved at tp 2 with replicas, loaded at tp 4 by columns: each block by one rank."""
    world, pair = Mesh().group("dp"), Mesh(tp=2).group("tp")
    whole = torch.arange(2.0**21).view(1024, 2048)
    ckpt.save(tmp_path / "c", {"model": _cut(whole, 0, pair)}, group=world)
    sizes = [path.stat().st_size for path in (tmp_path / "c").glob("*.safetensors")]
    net, read, real = _cut(torch.zeros_like(whole), 1, world), [], LocalSource.read
    try:
        LocalSource.read = lambda self, parts, offset: (
            read.extend(part.nbytes for part in parts),
            real(self, parts, offset),
        )[1]
        ckpt.load(tmp_path / "c", {"model": net}, group=world)
    finally:
        LocalSource.read = real
    assert sum(sum(one) for one in world.all_gather_object(read)) == sum(sizes)
    assert torch.equal(net.a, whole[:, 512 * world.rank :][:, :512])


def _cut(whole, dim, group):
    net = nn.Module()
    net.a = nn.Parameter(whole.tensor_split(group.size, dim)[group.rank].clone())
    mark(net, "a", ShardSpec(dim, group))
    return net


@ranks(1, 2)
def test_f161_what_is_missing_on_any_rank_is_told_to_all(tmp_path):
    world = Mesh().group("dp")
    ckpt.save(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(3), "n": 1}, group=world)
    mine = {"a": torch.zeros(2)} if world.rank == 0 else {"b": torch.zeros(3), "c": torch.ones(1)}
    with pytest.raises(ValueError, match="lacks c" if world.size == 2 else "state lacks b, n"):
        ckpt.load(tmp_path / "c", mine, group=world)
    assert not any(value.sum() for name, value in mine.items() if name != "c")
    report = ckpt.load(tmp_path / "c", mine, group=world, strict=False)
    assert report == ((["c"], ["n"]) if world.size == 2 else ([], ["b", "n"]))
    assert all(value.sum() for value in mine.values())


@ranks(1, 2)
def test_a_cast_by_policy_rounds_as_torch_does(tmp_path):
    world = Mesh().group("dp")
    net = nn.Linear(5, 4)
    whole = {name: one.detach().clone() for name, one in net.named_parameters()}
    ckpt.save(tmp_path / "c", {"model": net}, group=world)
    half = _cut(torch.zeros(4, 5, dtype=torch.bfloat16), 1, LOCAL)
    half.weight, half.bias = half.a, nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    del half.a
    cast = {torch.float32: torch.bfloat16}
    with pytest.raises(ValueError, match=r"model/weight has dtype torch.bfloat16, saved with"):
        ckpt.load(
            tmp_path / "c", {"model": half}, group=world, cast={torch.bfloat16: torch.float32}
        )
    ckpt.load(tmp_path / "c", {"model": half}, group=world, cast=cast)
    for name, one in half.named_parameters():
        assert torch.equal(one, whole[name].bfloat16())
    with pytest.raises(ValueError, match="must be from and to floating-point dtypes"):
        ckpt.load(tmp_path / "c", {"model": half}, group=world, cast={torch.float32: torch.int8})


def test_a_step_may_be_an_int_as_older_optimizers_kept_it(tmp_path):
    net = nn.Linear(2, 2, bias=False)
    adam = torch.optim.Adam(net.parameters())
    moment = torch.ones(2, 2)
    adam.state[net.weight] = {"step": 7, "exp_avg": moment, "exp_avg_sq": moment}
    ckpt.save(tmp_path / "c", {"model": net, "adam": adam})
    fresh = torch.optim.Adam(net.parameters())
    ckpt.load(tmp_path / "c", {"model": net, "adam": fresh})
    assert torch.equal(fresh.state[net.weight]["exp_avg"], moment)
    assert fresh.state[net.weight]["step"] == 7
    net.weight.grad = torch.zeros(2, 2)
    fresh.step()
    assert fresh.state[net.weight]["step"] == 8


def test_state_of_a_generator_is_a_tensor(tmp_path):
    generator = torch.Generator().manual_seed(5)
    ckpt.save(tmp_path / "c", {"dice": generator.get_state(), "nothing": torch.zeros(0, 3)})
    expected = torch.rand(3, generator=generator)
    state = {"dice": torch.Generator().get_state(), "nothing": torch.zeros(0, 3)}
    ckpt.load(tmp_path / "c", state)
    generator.set_state(state["dice"])
    assert torch.equal(torch.rand(3, generator=generator), expected)


@ranks(2)
def test_ranks_that_see_different_checkpoints_are_refused(tmp_path):
    world = Mesh().group("dp")
    mine = tmp_path / str(world.rank) / "c"
    ckpt.save(mine, {"step": world.rank})
    with pytest.raises(ckpt.CheckpointError, match="ranks see different checkpoints"):
        ckpt.load(mine, {"step": 0}, group=world)


@ranks(2)
def test_f102_each_rank_repeats_its_own_numbers(tmp_path):
    """Every rank's own stream is a row of a marked buffer; unmarked, it is refused by name."""
    ep = Mesh(ep=2).expert.group("ep")
    dice = torch.Generator().manual_seed(7 + 1024 + 100 * ep.rank)
    torch.rand(3, generator=dice)
    with pytest.raises(ValueError, match="must be equal; 1 tensors differ: dice/dice on ranks 0"):
        ckpt.save(tmp_path / "a", {"dice": dice.get_state()}, group=ep)
    streams = nn.Module()
    streams.register_buffer("dice", dice.get_state()[None])
    mark(streams, "dice", ShardSpec(0, ep))
    ckpt.save(tmp_path / "b", {"streams": streams}, group=ep)
    expected = torch.rand(3, generator=dice)
    with torch.no_grad():
        streams.get_buffer("dice").zero_()
    ckpt.load(tmp_path / "b", {"streams": streams}, group=ep)
    dice.set_state(streams.get_buffer("dice")[0])
    assert torch.equal(torch.rand(3, generator=dice), expected)
    first, second = ep.all_gather(expected)
    assert not torch.equal(first, second)
