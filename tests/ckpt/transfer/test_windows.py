"""Ranks of one host see each other's memory; where they cannot, all of them know."""

import os
from contextlib import nullcontext, suppress
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megablocks_core import ckpt
from megablocks_core.ckpt.transfer import exchange, windows
from megablocks_core.ckpt.transfer.windows import Windows
from megablocks_core.groups import Mesh, ShardSpec, mark
from megablocks_core.groups.swaps import swap
from megablocks_core.testing import ranks


def on_hosts(names):
    """Let each rank of the world believe that it is on the host of that name."""
    mine = names[Mesh().group("dp").rank]
    return patch.object(windows, "_host", lambda: f"a host of the test {mine}")


def _opened(mine, world):
    return mine.open(world.all_gather_object(mine.create()), group=world)


@ranks(2, 4)
def test_what_one_rank_writes_the_others_see():
    world = Mesh().group("dp")
    with Windows() as mine:
        assert _opened(mine, world) == [0] * world.size
        mine.resize(5000 + world.rank)
        mine.own().zero_()[-1] = 7 + world.rank
        world.barrier()
        for rank in range(world.size):
            if rank != world.rank:
                assert mine.of(rank).tolist() == [0] * (4999 + rank) + [7 + rank]
        world.barrier()
        mine.own()[0] = 3
        world.barrier()
        assert all(mine.of(rank)[0] == 3 for rank in range(world.size) if rank != world.rank)
        assert _num_files() >= world.size  # a mapping holds its file once more
    assert _num_files() == 0


def _num_files():
    """How many windows this process holds open; sockets of earlier worlds close meanwhile."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += "checkpoint-window" in os.readlink(f"/proc/self/fd/{descriptor}")
    return found


@ranks(4)
def test_ranks_on_other_hosts_and_without_windows_are_apart():
    world = Mesh().group("dp")
    with on_hosts("abab"), Windows() as mine:
        assert _opened(mine, world) == [0, 1, 0, 1]
    with patch.object(os, "memfd_create", side_effect=OSError), Windows() as mine:
        assert mine.create() is None
    with Windows() as mine:
        own = None if world.rank == 2 else mine.create()
        assert mine.open(world.all_gather_object(own), group=world) == [0, 0, 2, 0]


@pytest.mark.parametrize("fault", ["process", "descriptor", "token"])
@ranks(4)
def test_a_window_that_one_rank_does_not_see_is_used_by_none(fault):
    world = Mesh().group("dp")
    with Windows() as mine:
        addresses = world.all_gather_object(mine.create())
        if world.rank == 1:
            wrong = {"process": 2**22 + 1, "descriptor": 10_000, "token": b"x" * 16}[fault]
            addresses[3] = addresses[3]._replace(**{fault: wrong})
        assert mine.open(addresses, group=world) == [0, 1, 2, 3]


class _Net(nn.Module):
    """Tensors of several blocks, of two dtypes, cut along a dimension, and a small one."""

    def __init__(self, dim, group):
        super().__init__()
        for name, shape, dtype in (
            ("a", (2000, 2000), torch.float32),
            ("b", (1000, 3000), torch.bfloat16),
            ("c", (8, 4, 3), torch.float64),
        ):
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
            part = whole.to(dtype).tensor_split(group.size, dim)[group.rank].clone()
            self.register_buffer(name, part)
            mark(self, name, ShardSpec(dim, group))


@ranks(2, 4)
def test_states_are_equal_whoever_sees_whose_window(tmp_path):
    """All on one host, pairs on two, and each alone; rows and columns cut anew."""
    world = Mesh().group("dp")
    state = {"model": _Net(0, world), "whole": torch.arange(2.0**19)}
    ckpt.save(tmp_path / "c", state, group=world)
    for names in ("aaaa", "abab", "abcd"):
        for dim in (0, 1):
            expected, net = _Net(dim, world), _Net(dim, world)
            for one in net.buffers():
                one.fill_(-1)
            again = {"model": net, "whole": torch.zeros(2**19)}
            sent = []

            def counted(outgoing, incoming, *, group, sent=sent):
                sent.extend(one.nbytes for one in outgoing.values())
                return swap(outgoing, incoming, group=group)

            with on_hosts(names), patch.object(exchange, "swap", counted):
                ckpt.load(tmp_path / "c", again, group=world)
            for one, other in zip(net.buffers(), expected.buffers(), strict=True):
                assert torch.equal(one, other)
            assert torch.equal(again["whole"], state["whole"])
            total = sum(sum(one) for one in world.all_gather_object(sent))
            assert (total == 0) == (len(set(names[: world.size])) == 1)


@ranks(2, 4)
def test_damage_that_one_rank_reads_raises_on_all_in_any_round(tmp_path):
    world = Mesh().group("dp")
    ckpt.save(tmp_path / "c", {"model": _Net(0, world)}, group=world)
    path = tmp_path / "c" / sorted(one.name for one in (tmp_path / "c").glob("*.safetensors"))[0]
    for place in (0.01, 0.5, 0.99):
        if world.rank == 0:
            data = bytearray(path.read_bytes())
            data[int(place * len(data))] ^= 4
            path.write_bytes(data)
        world.barrier()
        with pytest.raises(ckpt.CheckpointError, match="is damaged: block"):
            ckpt.load(tmp_path / "c", {"model": _Net(1, world)}, group=world)
        world.barrier()
        if world.rank == 0:
            data[int(place * len(data))] ^= 4
            path.write_bytes(data)
        world.barrier()
    ckpt.load(tmp_path / "c", {"model": _Net(1, world)}, group=world)


@ranks(2)
def test_an_error_while_one_rank_looks_raises_on_all(tmp_path):
    world = Mesh().group("dp")
    ckpt.save(tmp_path / "c", {"model": _Net(0, world)}, group=world)
    fails = patch.object(Windows, "of", side_effect=MemoryError("no room to look"))
    raises = pytest.raises((ckpt.CheckpointError, MemoryError), match="no room to look")
    with raises, fails if world.rank == 1 else nullcontext():
        ckpt.load(tmp_path / "c", {"model": _Net(1, world)}, group=world)
    ckpt.load(tmp_path / "c", {"model": _Net(1, world)}, group=world)
