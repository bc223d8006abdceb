"""A save at one layout resumes at any other, or leaves everything as it was."""

import json
import os
import signal
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from megablocks_core import ckpt
from megablocks_core.ckpt.format.writing import Writer
from megablocks_core.ckpt.saving import commit, saving
from megablocks_core.ckpt.transfer.exchange import Exchange
from megablocks_core.files import disk
from megablocks_core.groups import (
    LOCAL,
    Mesh,
    Segment,
    ShardSpec,
    gather_whole,
    load_slices,
    logical_shape,
    mark,
    marks,
)
from megablocks_core.testing import ranks


class Net(nn.Module):
    """Cut by rows, by columns and packed with shared slices; replicated; a buffer; tied."""

    def __init__(self, group):
        super().__init__()
        size = group.size
        shared = Segment(4, parts=min(size, 2))
        self.rows = nn.Parameter(torch.zeros(8 // size, 6))
        self.columns = nn.Parameter(torch.zeros(6, 8 // size, dtype=torch.bfloat16))
        self.packed = nn.Parameter(torch.zeros(8 // size + 4 // min(size, 2), 3))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4, bias=False)
        self.tied = nn.Linear(6, 4, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        mark(self, "rows", ShardSpec(0, group))
        mark(self, "columns", ShardSpec(1, group))
        mark(self, "packed", ShardSpec(0, group, segments=(Segment(8), shared)))


def _build(group, *, steps=0, optimizer=torch.optim.AdamW):
    net = Net(group)
    with torch.no_grad():
        for number, (_, parameter, specs) in enumerate(marks(net)):
            load_slices(parameter, specs, _values(parameter, specs, number))
    adam = optimizer(net.parameters(), lr=0.01)
    for step in range(steps):
        _step(net, adam, step)
    return net, adam


def _step(net, optimizer, step):
    """One step whose whole gradients are the same at every layout."""
    for number, (_, parameter, specs) in enumerate(marks(net)):
        parameter.grad = torch.zeros_like(parameter)
        load_slices(parameter.grad, specs, _values(parameter, specs, 100 * step + number))
    optimizer.step()
    net.count += 1


def _values(parameter, specs, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(logical_shape(parameter, specs), generator=generator)


def _assert_same(net, expected):
    whole = gather_whole(net)
    assert set(whole) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(whole[name], tensor), name


@ranks(1, 2, 4)
def test_f165_any_layout_resumes_any_other(tmp_path):
    size = dist.get_world_size()
    world = Mesh().group("dp")
    mesh = Mesh(tp=max(size // 2, 1))
    net, adam = _build(mesh.group("tp"), steps=3)
    state = {"model": net, "optimizer": adam, "step": 3, "x": torch.arange(3)}
    ckpt.save(tmp_path / "run" / "step-3", state, group=world)
    unbroken, unbroken_adam = _build(LOCAL, steps=3)
    expected = [gather_whole(unbroken)]
    expected[0] = {name: tensor.clone() for name, tensor in expected[0].items()}
    _step(unbroken, unbroken_adam, 3)
    expected.append(gather_whole(unbroken))

    for tp, group in ((LOCAL, LOCAL), (mesh.group("tp"), world), (world, world)):
        net, adam = _build(tp, steps=1)
        state = {"model": net, "optimizer": adam, "step": 0, "x": torch.zeros(3).long()}
        report = ckpt.load(tmp_path / "run" / "step-3", state, group=group)
        assert report == ([], [])
        assert (state["step"], state["x"].tolist()) == (3, [0, 1, 2])
        _assert_same(net, expected[0])
        _step(net, adam, 3)
        _assert_same(net, expected[1])
    assert ckpt.latest(tmp_path / "run", group=world) == tmp_path / "run" / "step-3"
    ckpt.verify(tmp_path / "run" / "step-3")


@ranks(4)
def test_whole_tensors_are_the_same_at_any_layout(tmp_path):
    world = Mesh().group("dp")
    files = {}
    for tp in (1, 2, 4):
        net, adam = _build(Mesh(tp=tp).group("tp"), steps=2)
        folder = tmp_path / str(tp) / "a"
        state = {"model": net, "optimizer": adam}
        ckpt.save(folder, state, group=world, files={"config.json": {"model_type": "net"}})
        assert json.loads((folder / "config.json").read_text()) == {"model_type": "net"}
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        names = sorted(set(index["weight_map"].values()))
        assert names == [f"model-{number + 1:05}-of-00004.safetensors" for number in range(4)]
        files[tp] = {}
        for name in names:
            tensors = load_file(folder / name)
            assert all(index["weight_map"][key] == name for key in tensors)
            files[tp] |= tensors
        assert index["metadata"]["total_size"] == sum(one.nbytes for one in files[tp].values())
    assert set(files[1]) == {
        "rows", "columns", "packed", "norm.weight", "norm.bias", "head.weight", "count",
    }  # fmt: skip
    for name, tensor in files[1].items():
        assert torch.equal(files[2][name], tensor) and torch.equal(files[4][name], tensor)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam]
)
def test_other_optimizers_resume(tmp_path, optimizer):
    net, first = _build(LOCAL, steps=2, optimizer=optimizer)
    ckpt.save(tmp_path / "a", {"model": net, "optimizer": first})
    again, second = _build(LOCAL, optimizer=optimizer)
    ckpt.load(tmp_path / "a", {"model": again, "optimizer": second})
    for model, one in ((net, first), (again, second)):
        _step(model, one, 2)
    _assert_same(again, gather_whole(net))


def test_hyperparameters_and_kinds_of_state_come_back(tmp_path):
    net = nn.Linear(2, 2)
    groups = [{"params": [net.weight], "lr": torch.tensor(0.5)}, {"params": [net.bias]}]
    adam = torch.optim.Adam(groups, lr=0.25, betas=(0.5, 0.75), capturable=False, foreach=False)
    net(torch.ones(2)).sum().backward()
    adam.step()
    ckpt.save(tmp_path / "a", {"model": net, "optimizer": adam})

    again = nn.Linear(2, 2)
    groups = [{"params": [again.weight], "lr": torch.tensor(0.0)}, {"params": [again.bias]}]
    fresh = torch.optim.Adam(groups, lr=1.0, foreach=False)
    ckpt.load(tmp_path / "a", {"model": again, "optimizer": fresh})
    assert isinstance(fresh.param_groups[0]["lr"], torch.Tensor)
    assert [float(group["lr"]) for group in fresh.param_groups] == [0.5, 0.25]
    assert fresh.param_groups[1]["betas"] == (0.5, 0.75)
    for old, new in zip(net.parameters(), again.parameters(), strict=True):
        for key, value in adam.state[old].items():
            assert torch.equal(fresh.state[new][key], value)
            assert fresh.state[new][key].dtype == value.dtype


def test_optimizer_tensors_keep_a_dtype_that_is_not_the_parameters(tmp_path):
    net = nn.Linear(2, 2).bfloat16()
    adam = torch.optim.Adam(net.parameters())
    exact = torch.full((2, 2), 1 + 2**-20)
    adam.state[net.weight] = {"step": torch.tensor(7.0), "exp_avg": exact, "exp_avg_sq": exact}
    ckpt.save(tmp_path / "a", {"model": net, "optimizer": adam})
    fresh = torch.optim.Adam(net.parameters())
    ckpt.load(tmp_path / "a", {"model": net, "optimizer": fresh})
    assert torch.equal(fresh.state[net.weight]["exp_avg"], exact)
    assert net.bias not in fresh.state


@pytest.mark.parametrize(
    "value", [0.1, 1e-320, float("inf"), -(2**70), "\N{SNOWMAN}", None, True, {"a": [1, {"b": 2}]}]
)
def test_json_values_are_exact(tmp_path, value):
    ckpt.save(tmp_path / "a", {"value": value})
    state = {"value": 0}
    ckpt.load(tmp_path / "a", state)
    assert state["value"] == value and type(state["value"]) is type(value)


def test_what_json_would_change_is_refused(tmp_path):
    for value in ((1, 2), {1: 2}, np.float64(1), {1}, b"", object(), {"a": [1, (2,)]}):
        with pytest.raises(ValueError, match=r"state\['value'\]"):
            ckpt.save(tmp_path / "a", {"value": value})
    with pytest.raises(ValueError, match="state name '../a'"):
        ckpt.save(tmp_path / "a", {"../a": 1})
    assert not any(tmp_path.iterdir())


def test_optimizer_of_a_parameter_that_no_module_holds_is_refused(tmp_path):
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(5))])
    with pytest.raises(ValueError, match=r"state\['optimizer'\] optimises a parameter of shape"):
        ckpt.save(tmp_path / "a", {"model": nn.Linear(2, 2), "optimizer": stranger})


@ranks(2)
def test_optimizer_tensors_whose_cut_cannot_be_known_are_refused(tmp_path):
    world = Mesh().group("dp")
    net, _ = _build(world)
    factored = torch.optim.SGD(net.parameters())
    factored.state[net.rows] = {"row_mean": torch.ones(4)}
    with pytest.raises(ValueError, match="optimizer/model/rows/row_mean of shape"):
        ckpt.save(tmp_path / "a", {"model": net, "optimizer": factored}, group=world)


@ranks(2)
def test_marks_outside_the_group_are_refused(tmp_path):
    net, _ = _build(Mesh().group("dp"))
    with pytest.raises(ValueError, match=r"must include the ranks \[0, 1\] that hold model/rows"):
        ckpt.save(tmp_path / f"{dist.get_rank()}" / "a", {"model": net}, group=LOCAL)
    assert not any(tmp_path.iterdir())


@ranks(2)
def test_what_differs_between_ranks_is_refused(tmp_path):
    world = Mesh().group("dp")
    with pytest.raises(ValueError, match="must be equal; 1 tensors differ: x/x on ranks 0 and 1"):
        ckpt.save(tmp_path / "a", {"x": torch.full((2,), world.rank)}, group=world)
    with pytest.raises(ValueError, match=r"state\['step'\] must be equal on all ranks"):
        ckpt.save(tmp_path / "a", {"step": world.rank}, group=world)
    with pytest.raises(ValueError, match="must have the same names on all ranks"):
        ckpt.save(tmp_path / "a", {f"step{world.rank}": 1}, group=world)
    ckpt.save(tmp_path / "a", {"nan": float("nan"), "x": torch.tensor([torch.nan])}, group=world)


@ranks(4)
def test_replicas_of_a_slice_that_differ_are_named(tmp_path):
    world, tp = Mesh().group("dp"), Mesh(tp=2).group("tp")
    net, adam = _build(tp, steps=1)
    for tensor, name in (
        (net.packed, "model/packed"),
        (adam.state[net.rows]["exp_avg"], "exp_avg"),
    ):
        if world.rank == 3:
            tensor.data.view(-1)[-1] += 1
        with pytest.raises(ValueError, match=f"1 tensors differ: .*{name} on ranks 1 and 3"):
            ckpt.save(tmp_path / "a", {"model": net, "optimizer": adam}, group=world)
        if world.rank == 3:
            tensor.data.view(-1)[-1] -= 1
    assert not any(tmp_path.iterdir())


@ranks(2)
def test_ranks_that_disagree_on_what_there_is_are_refused(tmp_path):
    world = Mesh().group("dp")
    with pytest.raises(ValueError, match="path must be the same on all ranks"):
        ckpt.save(tmp_path / str(world.rank) / "a", {"step": 1}, group=world)
    with pytest.raises(ValueError, match="ranks disagree on x/x: shape"):
        ckpt.save(tmp_path / "a", {"x": torch.ones(2 + world.rank)}, group=world)
    uncovered = nn.Module()
    uncovered.a = nn.Parameter(torch.zeros(2))
    if world.rank == 0:
        mark(uncovered, "a", ShardSpec(0, world))
    with pytest.raises(ValueError, match="ranks disagree on model/a: shape"):
        ckpt.save(tmp_path / "a", {"model": uncovered}, group=world)
    with pytest.raises(ValueError, match="rank 1 has|differs"):
        ckpt.save(tmp_path / "a", {"model": uncovered if world.rank else 1}, group=world)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@ranks(2)
def test_f155_a_failing_rank_raises_on_all_and_nothing_is_lost(tmp_path):
    world = Mesh().group("dp")
    net, adam = _build(world, steps=1)
    ckpt.save(tmp_path / "step-1", {"model": net}, group=world)
    before = _listing(tmp_path)
    if world.rank == 1:
        net.rows = nn.Parameter(torch.zeros(4, 6, device="meta"))
    with pytest.raises(ValueError, match="model/rows is on meta"):
        ckpt.save(tmp_path / "step-2", {"model": net}, group=world)
    world.barrier()
    assert _listing(tmp_path) == before
    net, adam = _build(world, steps=2)
    ckpt.save(tmp_path / "step-2", {"model": net, "optimizer": adam}, group=world)
    assert ckpt.latest(tmp_path, group=world) == tmp_path / "step-2"


def test_target_may_be_empty_but_never_filled(tmp_path):
    (tmp_path / "a").mkdir()
    ckpt.save(tmp_path / "a", {"step": 1})
    before = _listing(tmp_path)
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        ckpt.save(tmp_path / "a", {"step": 2})
    assert _listing(tmp_path) == before


def test_nothing_on_the_load_path_is_pickle(tmp_path):
    net, adam = _build(LOCAL, steps=1)
    ckpt.save(tmp_path / "a", {"model": net, "optimizer": adam})
    assert {path.suffix for path in (tmp_path / "a").iterdir()} == {".safetensors", ".json"}
    json.loads((tmp_path / "a" / "manifest.json").read_text())


def _listing(root):
    """Every file below a folder, with its bytes."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


@ranks(2)
def test_what_one_rank_asks_wrongly_is_refused_on_all(tmp_path):
    world = Mesh().group("dp")
    for wrong in ({"keep_last": 0}, {"keep_every": -1}, {"files": {"../a": 1}}):
        options = wrong if world.rank else {}
        with pytest.raises(ValueError, match="must be"):
            ckpt.save(tmp_path / "a", {"x": torch.ones(1)}, group=world, **options)
    assert not (tmp_path / "a").exists()


# Where Ctrl-C comes on the last rank: before a call of a function, and which.
INTERRUPTED = {
    "while it takes the state apart": (saving, "take_apart", 1),
    "while ranks tell what they hold": (saving, "all_texts", 1),
    "while a file is made": (disk, "create", 1),
    "while tensors are sent": (Exchange, "send", 1),
    "while it writes": (disk, "write", 2),
    "while it ends": (Writer, "finish", 1),
}


@pytest.mark.parametrize("when", INTERRUPTED)
@ranks(2)
def test_ctrl_c_on_one_rank_ends_all_and_leaves_nothing(tmp_path, when):
    """Also where ranks talk: there it waits for the next step that all can leave."""
    owner, name, at = INTERRUPTED[when]
    world = Mesh(tp=2).group("tp")
    net, adam = _build(world, steps=1)
    state = {"model": net, "optimizer": adam, "step": 1}
    ckpt.save(tmp_path / "before", state, group=world)
    kind = KeyboardInterrupt if world.rank == 1 else ckpt.CheckpointError
    message = "" if world.rank == 1 else r"save\(.*failed on rank 1: KeyboardInterrupt$"
    with _interrupted(owner, name, at=at) as seen, pytest.raises(kind, match=message):
        ckpt.save(tmp_path / "out", state, group=world)
    assert len(seen) >= at
    world.all_gather_object(None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "before"]
    assert str(ckpt.latest(tmp_path, group=world)).endswith("before")
    ckpt.save(tmp_path / "out", state, group=world)
    ckpt.verify(tmp_path / "out")


@ranks(2)
def test_ctrl_c_while_a_checkpoint_is_committed_waits_until_it_stands(tmp_path):
    world = Mesh(tp=2).group("tp")
    net, adam = _build(world, steps=1)
    state = {"model": net, "optimizer": adam, "step": 1}
    ends = pytest.raises(KeyboardInterrupt) if world.rank == 1 else nullcontext()
    with _interrupted(commit, "at_first_rank", at=1), ends:
        ckpt.save(tmp_path / "out", state, group=world)
    world.all_gather_object(None)
    assert str(ckpt.latest(tmp_path, group=world)).endswith("out")
    ckpt.verify(tmp_path / "out")


@contextmanager
def _interrupted(owner, name, *, at):
    """Ctrl-C on the last rank, before a call of a function; the signal of a worker is ignored."""
    seen, real = [], getattr(owner, name)

    def call(*arguments, **options):
        seen.append(1)
        if len(seen) == at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with patch.object(owner, name, call):
            yield seen
    finally:
        signal.signal(signal.SIGINT, before)
