"""Saves beside training: what was there when ``save`` returned, or an error at the next call."""

import ctypes
import random
import subprocess
import sys
import textwrap
import time
import warnings
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from megablocks_core import ckpt
from megablocks_core.ckpt.saving import async_saver
from megablocks_core.files import disk
from megablocks_core.groups import Group, Mesh
from megablocks_core.parallel import ColumnParallelLinear
from megablocks_core.testing import ranks
from tests.ckpt.flat_optimizer import FlatAdam


def _world():
    return Group.of(dist.group.WORLD)


def _own_world():
    return Mesh(timeout=timedelta(minutes=1)).group("dp")


def _held(monkeypatch):
    """Saves wait for the event that is returned, before anything is written."""
    go, save_entries = Event(), async_saver.save_entries

    def held(*arguments, **options):
        go.wait()
        save_entries(*arguments, **options)

    monkeypatch.setattr(async_saver, "save_entries", held)
    return go


def test_a_change_right_after_never_reaches_the_file(tmp_path, monkeypatch):
    go, model, step = _held(monkeypatch), nn.Linear(4, 3), {"losses": [1.0]}
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": step}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with ckpt.AsyncSaver() as saver:
        saver.save(tmp_path / "a", state)
        assert saver.is_busy
        optimizer.step()
        step["losses"].append(2.0)
        go.set()
    assert not saver.is_busy
    assert not torch.equal(model.weight, before["weight"])
    ckpt.load(tmp_path / "a", state)
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert state["step"] == {"losses": [1.0]}


def test_f153_the_last_of_several_saves_is_the_one_that_resumes(tmp_path):
    state, durable = {"x": torch.zeros(2), "step": 0}, []
    with ckpt.AsyncSaver(on_durable=durable.append) as saver:
        for step in (1, 2):
            state["x"].fill_(step)
            saver.save(tmp_path / f"step-{step}", {**state, "step": step})
    assert durable == [str(tmp_path / "step-1"), str(tmp_path / "step-2")]
    assert ckpt.load_latest(tmp_path, state) == tmp_path / "step-2"
    assert (state["step"], state["x"].tolist()) == (2, [2.0, 2.0])


def test_f155_a_failed_save_is_heard_of_at_the_next_call_and_nothing_is_deleted(tmp_path):
    x, durable = torch.ones(3), []
    saver = ckpt.AsyncSaver(on_durable=durable.append)
    saver.save(tmp_path / "a", {"x": x})
    saver.wait()
    (tmp_path / "b").write_text("in the way")
    saver.save(tmp_path / "b", {"x": x}, keep_last=1)
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        saver.save(tmp_path / "c", {"x": x})
    assert durable == [str(tmp_path / "a")]
    assert not (tmp_path / "c").exists()
    assert ckpt.latest(tmp_path) == tmp_path / "a"
    saver.save(tmp_path / "c", {"x": x})  # heard of once
    saver.close()
    assert ckpt.latest(tmp_path) == tmp_path / "c"


def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
    with ckpt.AsyncSaver() as saver:
        with pytest.raises(ValueError, match="must be a module"):
            saver.save(tmp_path / "a", {"x": object()})
        assert not saver.is_busy
        saver.save(tmp_path / "a", {"x": torch.ones(1)})
    assert ckpt.latest(tmp_path) == tmp_path / "a"


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    go, finished = _held(monkeypatch), []
    saver = ckpt.AsyncSaver(on_durable=lambda path: finished.append(Path(path).name))
    saver.save(tmp_path / "a", {"x": torch.ones(1)})
    assert finished == []
    go.set()
    saver.save(tmp_path / "b", {"x": torch.ones(1)})
    assert finished[:1] == ["a"]
    saver.close()
    assert finished == ["a", "b"]


def test_an_abandoned_save_leaves_nothing(tmp_path, monkeypatch):
    go, saver = _held(monkeypatch), ckpt.AsyncSaver()
    saver.save(tmp_path / "a", {"x": torch.ones(1)})
    monkeypatch.setattr(saver._thread, "join", _then(go.set, saver._thread.join))
    saver.abandon()
    assert list(tmp_path.iterdir()) == []
    saver.save(tmp_path / "b", {"x": torch.ones(1)})
    saver.close()
    assert ckpt.latest(tmp_path) == tmp_path / "b"


def test_an_error_in_the_body_abandons(tmp_path, monkeypatch):
    go = _held(monkeypatch)
    with pytest.raises(KeyError, match="loss"), ckpt.AsyncSaver() as saver:
        saver.save(tmp_path / "a", {"x": torch.ones(1)})
        monkeypatch.setattr(saver._thread, "join", _then(go.set, saver._thread.join))
        raise KeyError("loss")
    assert list(tmp_path.iterdir()) == []


def _then(first, second):
    def both():
        first()
        second()

    return both


@ranks(2)
@pytest.mark.parametrize("saves", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_saves_beside_collectives_of_training_with_random_delays(saves, tmp_path):
    root, world = tmp_path, _world()
    tp = Mesh(tp=2).group("tp")
    model, delays = ColumnParallelLinear(6, 4, group=tp).double(), random.Random(dist.get_rank())
    with ckpt.AsyncSaver(group=_own_world()) as saver:
        for step in range(saves):
            with torch.no_grad():
                model.weight.fill_(step)
            saver.save(root / f"{step:02}", {"model": model, "step": step}, keep_last=2)
            for _ in range(3):
                time.sleep(delays.random() / 500)
                assert world.all_reduce(torch.tensor([step])).item() == 2 * step
    state = {"model": model, "step": 0}
    assert ckpt.load_latest(root, state, group=world) == root / f"{saves - 1:02}"
    assert (state["step"], model.weight.unique().tolist()) == (saves - 1, [saves - 1])
    assert len([path for path in root.iterdir() if path.is_dir()]) == 2


@ranks(2)
def test_an_error_on_one_rank_is_raised_on_all(tmp_path):
    root, group = tmp_path, _own_world()
    saver = ckpt.AsyncSaver(group=group)
    state = {"x": torch.ones(1) if group.rank else object()}
    if group.rank == 0:
        with pytest.raises(ValueError, match="must be a module"):
            saver.save(root / "a", state)
    else:
        saver.save(root / "a", state)
        with pytest.raises(ValueError, match="failed on rank 0"):
            saver.wait()
    assert not (root / "a").exists()
    saver.save(root / "b", {"x": torch.ones(1)})
    saver.wait()


@ranks(2)
def test_what_is_told_of_a_durable_save_fails_on_all_or_none(tmp_path):
    group = _own_world()

    def tell(path):
        if group.rank == 0 and path.endswith("a"):
            raise OSError("nobody listens")

    saver = ckpt.AsyncSaver(group=group, on_durable=tell)
    saver.save(tmp_path / "a", {"x": torch.ones(1)})
    with pytest.raises((OSError, ckpt.CheckpointError), match="nobody listens"):
        saver.save(tmp_path / "b", {"x": torch.ones(1)})
    assert not (tmp_path / "b").exists()
    saver.save(tmp_path / "c", {"x": torch.ones(1)})
    saver.close()
    assert ckpt.latest(tmp_path, group=group) == tmp_path / "c"


@ranks(2)
def test_one_rank_abandons_for_all(tmp_path):
    root, group = tmp_path, _own_world()
    saver, go = ckpt.AsyncSaver(group=group), Event()
    state = {"x": torch.ones(1)}
    if group.rank == 0:
        save_entries = async_saver.save_entries
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                async_saver, "save_entries", lambda *a, **k: (go.wait(), save_entries(*a, **k))
            )
            saver.save(root / "a", state)
            patch.setattr(saver._thread, "join", _then(go.set, saver._thread.join))
            saver.abandon()
    else:
        saver.save(root / "a", state)
        with pytest.raises(ckpt.CheckpointError, match="rank 0: .*abandoned"):
            saver.close()
    assert not (root / "a").exists()


@ranks(2)
def test_groups_that_training_uses_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is the default process group"):
        ckpt.AsyncSaver(group=_world())
    tp = Mesh(tp=2, timeout=timedelta(minutes=1)).group("tp")
    saver = ckpt.AsyncSaver(group=tp)
    with pytest.raises(ValueError, match="cuts model/weight"):
        saver.save(tmp_path / "a", {"model": ColumnParallelLinear(6, 4, group=tp)})


@ranks(2)
def test_groups_of_fully_shard_and_of_wrappers_are_refused(tmp_path):
    own = _own_world()
    saver = ckpt.AsyncSaver(group=own)
    # torch takes meshes of the same ranks for one where it knows a shape, so each has its own.
    sharded = nn.Linear(13, 10)
    fully_shard(sharded, mesh=DeviceMesh.from_group(own.pg, "cpu"))
    with pytest.raises(ValueError, match="group= is of the mesh of model/weight"):
        saver.save(tmp_path / "a", {"model": sharded})
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 2), process_group=own.pg)
    with pytest.raises(ValueError, match="is process_group of a DistributedDataParallel in model"):
        saver.save(tmp_path / "a", {"model": wrapped})
    optimizer = FlatAdam([[nn.Parameter(torch.zeros(4))]], group=own)
    with pytest.raises(ValueError, match="is group of a FlatAdam in optimizer"):
        saver.save(tmp_path / "a", {"optimizer": optimizer})
    sharded = nn.Linear(17, 12)
    fully_shard(sharded, mesh=DeviceMesh("cpu", [0, 1]))
    saver.save(tmp_path / "a", {"model": sharded})
    saver.close()
    assert ckpt.latest(tmp_path, group=own) == tmp_path / "a"


@ranks(2)
@pytest.mark.parametrize("call", ["write", "sync", "rename"])
def test_a_fault_of_the_disk_is_heard_of_on_all_ranks_and_training_goes_on(tmp_path, call):
    world, state = _world(), {"x": torch.ones(5), "y": torch.ones(3, dtype=torch.float64)}
    with ckpt.AsyncSaver(group=_own_world()) as saver:
        saver.save(tmp_path / "a", state)
        saver.wait()
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 0:
                patch.setattr(disk, call, _broken)
            saver.save(tmp_path / "b", state)
            for _ in range(5):
                assert world.all_reduce(torch.ones(1)).item() == 2
            with pytest.raises((OSError, ckpt.CheckpointError), match="Input/output error"):
                saver.save(tmp_path / "c", state)
        assert ckpt.latest(tmp_path, group=world) == tmp_path / "a"
        saver.save(tmp_path / "c", state)
    assert ckpt.latest(tmp_path, group=world) == tmp_path / "c"


def _broken(*_, **__):
    raise OSError(5, "Input/output error")


@ranks(2)
def test_a_rank_that_does_not_save_is_missed_within_the_timeout(tmp_path):
    world, own = _world(), Mesh(timeout=timedelta(seconds=2)).group("dp")
    saver = ckpt.AsyncSaver(group=own)
    if world.rank == 0:
        saver.save(tmp_path / "a", {"x": torch.ones(1)})
        with pytest.raises(RuntimeError):
            saver.wait()
        assert list(tmp_path.iterdir()) == []
    assert world.all_reduce(torch.ones(1)).item() == 2


def test_host_memory_does_not_grow_over_twenty_saves(tmp_path):
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    buffers, sizes = set(), []
    with ckpt.AsyncSaver() as saver:
        for step in range(20):
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
            state = {"model": model, "optimizer": optimizer, "step": step}
            saver.save(tmp_path / str(step), state, keep_last=1)
            buffers.add((saver._copies.buffer.data_ptr(), saver._copies.buffer.numel()))
            saver.wait()
            sizes.append(_resident())
    assert len(buffers) == 1
    assert max(sizes[5:]) - max(sizes[:5]) < 2 * 2**20  # the state has 12 MB


def _resident():
    """Memory that is held, without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


# Two ranks train and save until SIGTERM comes to one of them or to both, at any moment. By default
# it ends a process at once; told to "wait", ranks agree to stop, and wait for the save under way.
_TRAIN_UNTIL_TERMINATED = """
    import itertools, os, random, signal, sys, time, warnings, torch
    import torch.distributed as dist
    from datetime import timedelta
    from megablocks_core import ckpt
    from megablocks_core.groups import Group, Mesh

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = random.Random(sys.argv[2])

    def train(root, rank, waits):
        stop = []
        if waits:
            signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{root}/store", 2), rank=rank, world_size=2,
            timeout=timedelta(seconds=20))
        world, own = Group.of(dist.group.WORLD), Mesh(timeout=timedelta(seconds=20)).group("dp")

        def durable(path):
            with open(f"{root}/durable{rank}", "ab") as file:
                file.write(b".")

        with ckpt.AsyncSaver(group=own, on_durable=durable) as saver:
            for step in itertools.count(1):
                x = torch.full((200_000,), float(step))
                saver.save(f"{root}/run/step-{step}", {"x": x, "step": step}, keep_last=2)
                if world.all_reduce(torch.tensor(len(stop))):
                    saver.wait()
                    with open(f"{root}/stopped{rank}", "w") as file:
                        file.write(str(step))
                    break

    for number in range(int(sys.argv[2])):
        root = os.path.join(sys.argv[1], str(number))
        os.mkdir(root)
        children = []
        for rank in range(2):
            if not (child := os.fork()):
                try:
                    train(root, rank, waits=number % 2)
                    os._exit(0)
                except BaseException:
                    os._exit(1)
            children.append(child)
        while not all(os.path.exists(f"{root}/durable{rank}") for rank in range(2)):
            time.sleep(0.001)
        time.sleep(chosen.uniform(0, 0.05))
        for child in chosen.sample(children, chosen.choice([1, 2])):
            os.kill(child, signal.SIGTERM)
        codes = [os.waitpid(child, 0)[1] for child in children]
        assert (not any(codes)) if number % 2 else any(codes), codes
"""


@pytest.mark.parametrize("times", [6, pytest.param(60, marks=pytest.mark.drill)])
def test_sigterm_during_a_save_ends_in_a_whole_checkpoint_or_none(tmp_path, times):
    command = [sys.executable, "-c", textwrap.dedent(_TRAIN_UNTIL_TERMINATED), tmp_path, str(times)]
    done = subprocess.run(command, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for number in range(times):
        root = tmp_path / str(number)
        durable = [len((root / f"durable{rank}").read_bytes()) for rank in range(2)]
        state = {"x": torch.zeros(200_000), "step": 0}
        with warnings.catch_warnings(action="ignore"):
            path = ckpt.load_latest(root / "run", state)
            assert path == root / "run" / f"step-{state['step']}"
            ckpt.verify(path)
        assert (state["x"] == state["step"]).all()
        assert max(durable) <= state["step"] <= min(durable) + 1
        if number % 2:
            stopped = [int((root / f"stopped{rank}").read_text()) for rank in range(2)]
            assert stopped == [state["step"]] * 2
            assert ckpt.prune(root / "run", leftovers=True) == []
