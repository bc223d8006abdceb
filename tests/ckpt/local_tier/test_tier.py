"""What a tier is made of is checked on all ranks, and it stands beside saves on shared storage."""

import socket
from datetime import timedelta

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks


@ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks(tmp_path):
    world = Mesh().group("dp")
    refused = [
        ({"copies": 2, "hosts": ["a", "b"]}, "copies=2 must be from 0 to 1"),
        ({"copies": -1, "hosts": ["a", "b"]}, "copies=-1 must be from 0 to 1"),
        ({}, "copies=1 must be from 0 to 0, .* of the 1 that the ranks are on"),
        ({"hosts": ["a"]}, r"hosts=\['a'\] must name a host for 2 ranks"),
        ({"copies": 0, "keep_last": world.rank}, "keep_last=0 must be at least 1"),
        ({"copies": world.rank, "hosts": ["a", "b"]}, "must be the same on all ranks: rank 0 has"),
        ({"hosts": ["a", "b"][:: 1 - 2 * world.rank]}, "must be the same on all ranks: rank 0 has"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            ckpt.LocalTier(tmp_path, group=world, **options)
    folder = "memory://x" if world.rank else tmp_path
    with pytest.raises(ValueError, match="folder='memory://x' must be a path on this host"):
        ckpt.LocalTier(folder, group=world, copies=0)
    with pytest.raises(ValueError, match="must be a Group"):
        ckpt.LocalTier(tmp_path, group="dp")  # type: ignore[arg-type]


@ranks(2)
def test_hosts_are_found_by_their_names(tmp_path):
    world = Mesh().group("dp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"node{world.rank}")
        tier = ckpt.LocalTier(tmp_path / str(world.rank), group=world)
    assert tier._partners == [[1], [0]]


def test_one_process_needs_no_other_host(tmp_path):
    tier = ckpt.LocalTier(tmp_path / "a" / "b", copies=0)
    state = {"x": torch.arange(3), "y": torch.zeros(2, 0), "lr": float("nan"), "n": 2**70}
    assert tier.load_newest(state) is None
    tier.save(0, state)
    found = {"x": torch.zeros(3, dtype=torch.int64), "y": torch.ones(2, 0), "lr": 0, "n": 0}
    assert tier.load_newest(found) == 0
    assert found["x"].tolist() == [0, 1, 2] and found["lr"] != found["lr"] and found["n"] == 2**70


@ranks(2)
def test_a_run_saves_often_on_its_hosts_and_now_and_then_on_shared_storage(tmp_path):
    world, own = (Mesh(timeout=timedelta(minutes=1)).group("dp") for _ in range(2))

    def tier():
        return ckpt.LocalTier(tmp_path / str(world.rank), group=world, hosts=["a", "b"])

    def resumed(folder):
        state = {"x": torch.zeros(3), "step": 0}
        try:
            step = tier().load_newest(state)
        except ckpt.CheckpointError:
            step = None
        if step is None:
            ckpt.load_latest(folder, state, group=world)
        return state["step"], state["x"].tolist()

    state = {"x": torch.zeros(3), "step": 0}
    with ckpt.AsyncSaver(group=own) as saver:
        quick = tier()
        for step in range(1, 8):
            state["x"] += 1
            state["step"] = step
            if step % 4 == 0:
                saver.save(tmp_path / "shared" / f"step-{step}", state)
            if step % 2 == 0:
                quick.save(step, state)
    assert resumed(tmp_path / "shared") == (6, [6.0] * 3)
    world.barrier()
    for part in (tmp_path / str(world.rank)).iterdir():
        (part / "manifest.json").unlink()
    world.barrier()
    assert resumed(tmp_path / "shared") == (4, [4.0] * 3)
