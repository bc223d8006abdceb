"""A save at one layout resumes at any other, or leaves everything as it was."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from megablocks_core import ckpt
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
def test_f_165_any_layout_resumes_any_other(tmp_path):
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
def test_files_are_the_same_bytes_at_any_layout(tmp_path):
    world = Mesh().group("dp")
    for tp in (1, 2, 4):
        net, adam = _build(Mesh(tp=tp).group("tp"), steps=2)
        ckpt.save(tmp_path / str(tp) / "a", {"model": net, "optimizer": adam}, group=world)
    if world.rank == 0:
        for file in ("model.safetensors", "optimizer.safetensors"):
            first, *others = [(tmp_path / str(tp) / "a" / file).read_bytes() for tp in (1, 2, 4)]
            assert others == [first, first]
        whole = load_file(tmp_path / "4" / "a" / "model.safetensors")
        assert set(whole) == {
            "rows", "columns", "packed", "norm.weight", "norm.bias", "head.weight", "count",
        }  # fmt: skip


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
    with pytest.raises(ValueError, match=r"at \['x/x'\]: a tensor without shard marks"):
        ckpt.save(tmp_path / "a", {"x": torch.full((2,), world.rank)}, group=world)
    with pytest.raises(ValueError, match=r"at \['step'\]: JSON values"):
        ckpt.save(tmp_path / "a", {"step": world.rank}, group=world)
    with pytest.raises(ValueError, match="must have the same names on all ranks"):
        ckpt.save(tmp_path / "a", {f"step{world.rank}": 1}, group=world)
    ckpt.save(tmp_path / "a", {"nan": float("nan"), "x": torch.tensor([torch.nan])}, group=world)


@ranks(2)
def test_f_155_a_failing_rank_raises_on_all_and_nothing_is_lost(tmp_path):
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


@ranks(2)
def test_full_disk_raises_on_all_ranks_and_leaves_the_old_checkpoint(tmp_path):
    world = Mesh().group("dp")
    root = tmp_path / "run"
    if world.rank == 0:
        _mount_small_disk(root)
    world.barrier()
    try:
        ckpt.save(root / "step-1", {"x": torch.ones(1000), "step": 1}, group=world)
        before = _listing(root)
        for fits in (0, 1):  # the tensors do not fit, or the second file
            state = {"x": torch.ones(1000 + 10**6 * (1 - fits)), "y": torch.ones(10**6)}
            with pytest.raises(OSError if world.rank == 0 else ckpt.CheckpointError) as caught:
                ckpt.save(root / "step-2", state, group=world)
            assert "No space left" in str(caught.value)
            world.barrier()
            assert _listing(root) == before
        state = {"x": torch.zeros(1000), "step": 0}
        assert ckpt.load_latest(root, state, group=world) == root / "step-1"
        assert state["step"] == 1 and state["x"].sum() == 1000
    finally:
        world.barrier()
        if world.rank == 0:
            subprocess.run(["umount", root], check=True)


def test_a_disk_that_is_full_at_any_byte_leaves_the_old_checkpoint(tmp_path):
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


@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
def test_a_call_that_fails_at_any_time_leaves_the_old_checkpoint(tmp_path, monkeypatch, call):
    ckpt.save(tmp_path / "step-1", {"step": 1})
    before = _listing(tmp_path)
    state = {"x": torch.ones(5), "y": torch.ones(5), "step": 2}
    real = getattr(os, call)
    for number in range(20):
        seen = 0

        def failing(*args, number=number):
            nonlocal seen
            seen += 1
            if seen == number + 1:
                raise OSError(5, "Input/output error")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                ckpt.save(tmp_path / "step-2", state)
            except OSError:
                assert ckpt.load_latest(tmp_path, {"step": 0}) == tmp_path / "step-1"
                assert _listing(tmp_path) == before
                continue
        break
    assert number >= 1 and ckpt.latest(tmp_path) == tmp_path / "step-2"


_SAVE_UNTIL_KILLED = """
    import itertools, os, signal, sys, time, torch
    from megablocks_core import ckpt

    torch.set_num_threads(1)
    for number in range(20):
        root = os.path.join(sys.argv[1], str(number))
        os.mkdir(root)
        if not (child := os.fork()):
            for step in itertools.count(1):
                state = {"x": torch.full((200_000,), float(step)), "step": step}
                ckpt.save(f"{root}/step-{step}", state)
                with open(f"{root}/durable", "ab") as file:
                    file.write(b".")
        while not os.path.exists(f"{root}/durable"):
            time.sleep(0.001)
        time.sleep(number * 0.0013)
        os.kill(child, signal.SIGKILL)
        os.wait()
"""


def test_sigkill_at_any_moment_leaves_a_whole_latest_checkpoint(tmp_path):
    script = textwrap.dedent(_SAVE_UNTIL_KILLED)
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True, timeout=120)
    for root in tmp_path.iterdir():
        durable = len((root / "durable").read_bytes())
        state = {"x": torch.zeros(200_000), "step": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = ckpt.load_latest(root, state)
        assert path is not None
        ckpt.verify(path)
        assert state["step"] in (durable, durable + 1) and path.name == f"step-{state['step']}"
        assert (state["x"] == state["step"]).all()
        ckpt.save(root / f"step-{state['step'] + 1}", state)


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


def _mount_small_disk(root):
    root.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", root], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a small disk needs root: {done.stderr.decode()}")
