"""A save on the hosts is there on all of them, or the one before it is."""

import os
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.local_tier import saving
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.transfer import exchange
from megablocks_core.files import disk
from megablocks_core.groups import Group, Mesh
from megablocks_core.groups.swaps import swap
from megablocks_core.testing import ranks
from tests.ckpt.local_tiers import Hosts, assert_holds, state_of


def _listing(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@ranks(4)
def test_a_copy_is_equal_to_its_original_and_lies_on_another_host(tmp_path):
    world = Mesh().group("dp")
    hosts = Hosts(tmp_path, ["a", "a", "b", "b"], world)
    hosts.tier().save(3, state_of(world, 1))
    world.barrier()
    found = _listing(tmp_path / "a")
    assert found == _listing(tmp_path / "b")
    names = {name.partition("/")[0] for name in found}
    assert len(names) == 4 and {name.partition(".")[0] for name in names} == {"step-3"}
    ckpt.verify(hosts.parts("a")[0])


@ranks(1, 2)
def test_the_last_saves_stay_as_many_as_asked_for(tmp_path):
    world = Mesh().group("dp")
    names = ["a", "b"][: world.size]
    for keep_last in (1, 2):
        hosts = Hosts(tmp_path, names, world, copies=world.size - 1, keep_last=keep_last)
        for step in (5, 6, 7):
            hosts.tier().save(step, state_of(world, step))
        world.barrier()
        steps = {path.name.partition(".")[0] for path in hosts.parts("a")}
        assert steps == {f"step-{step}" for step in (6, 7)[2 - keep_last :]}
    left = hosts.parts("a")[0]
    hosts.alone(lambda: left.rename(left.with_name(f".{left.name}.0123abcd.partial")))
    hosts.tier().save(8, state_of(world, 8))  # deletes what killed saves left
    world.barrier()
    assert all(name.startswith("step-") for name in os.listdir(tmp_path / "a"))


@ranks(3)
def test_each_part_is_sent_once_for_each_copy_and_on_load_only_what_is_lacking(tmp_path):
    world = Mesh().group("dp")
    hosts, state = Hosts(tmp_path, ["a", "b", "c"], world, copies=2), {"x": torch.zeros(10, 100)}
    tier = hosts.tier()
    assert _messages(tier.save, 1, state) == ([4000, 4000], 1 + 7)
    assert _messages(tier.load_newest, state) == ([], 1 + 8)
    hosts.lose("a")
    found = _messages(tier.load_newest, state)
    sent = world.all_gather_object(found[0])
    assert sorted(sent) == [[], [], [4000]] and sent[0] == []


def _messages(call, *arguments):
    """Sizes of the messages of tensors that this rank sends, and how many small ones all have."""
    sent, small = [], []

    def swapped(outgoing, incoming, *, group):
        sent.extend(one.nbytes for one in outgoing.values())
        swap(outgoing, incoming, group=group)

    def gathered(group, value):
        small.append(value)
        return gather(group, value)

    gather = Group.all_gather_object
    with patch.object(exchange, "swap", swapped), patch.object(Group, gather.__name__, gathered):
        call(*arguments)
    return sent, len(small)


class _Fault:
    """Call ``number`` of a function of ``files.disk`` fails."""

    def __init__(self, patch, call, number):
        self.real, self.number, self.seen = getattr(disk, call), number, 0
        patch.setattr(disk, call, self)

    def __call__(self, *args, **options):
        self.seen += 1
        if self.seen == self.number:
            raise OSError(5, "Input/output error")
        return self.real(*args, **options)


@ranks(2)
@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "make_folder"])
def test_a_fault_at_any_call_raises_on_all_ranks_and_the_save_before_stays(tmp_path, call):
    world = Mesh().group("dp")
    hosts = Hosts(tmp_path, ["a", "b"], world)
    hosts.tier().save(1, state_of(world, 1))
    world.barrier()
    before, reached = _listing(tmp_path), 0
    for number in range(1, 50):
        with pytest.MonkeyPatch.context() as patched:
            fault = _Fault(patched, call, number if world.rank else 0)
            try:
                hosts.tier().save(2, state_of(world, 2))
                failed = False
            except (OSError, ckpt.CheckpointError) as error:
                assert "Input/output error" in str(error)
                failed = True
        outcomes = world.all_gather_object((failed, fault.seen >= number))
        if not failed:
            break
        assert all(failed for failed, _ in outcomes)
        reached += 1
        assert _listing(tmp_path) == before
        state = state_of(world, 9)
        assert hosts.tier().load_newest(state) == 1
        assert_holds(world, state, 1)
    assert reached >= 1
    # A rename that failed while an older part was deleted is only warned of.
    state = state_of(world, 9)
    assert hosts.tier().load_newest(state) == 2
    assert_holds(world, state, 2)


@ranks(2)
def test_a_disk_that_fills_up_raises_on_all_ranks_and_the_save_before_stays(tmp_path):
    world = Mesh().group("dp")
    hosts, small = Hosts(tmp_path, ["a", "b"], world), tmp_path / "b"
    if world.rank == 0:
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small]
        done = subprocess.run(mount, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"mounting a small disk needs root: {done.stderr.decode()}")
    world.barrier()
    try:
        hosts.tier().save(1, {"x": torch.full((9,), 1.0)})
        for asked in (True, False):  # what the system says is free, and what then is
            with pytest.MonkeyPatch.context() as patched:
                if not asked:
                    patched.setattr(LocalPlace, "free_bytes", lambda _: None)
                with pytest.raises((OSError, ckpt.CheckpointError), match="No space left"):
                    hosts.tier().save(2, {"x": torch.zeros(10**6)})
            world.barrier()
            assert len(hosts.parts("a")) == len(hosts.parts("b")) == 2
        state = {"x": torch.zeros(9)}
        assert hosts.tier().load_newest(state) == 1 and (state["x"] == 1).all()
    finally:
        world.barrier()
        if world.rank == 0:
            subprocess.run(["umount", small], check=True)


@ranks(2)
def test_a_copy_that_differs_from_what_was_sent_is_no_save(tmp_path):
    world = Mesh().group("dp")
    hosts = Hosts(tmp_path, ["a", "b"], world)
    hosts.tier().save(1, state_of(world, 1))
    world.barrier()
    before = _listing(tmp_path)

    def spoiled(self):
        real_unpack(self)
        for pieces in self._incoming.values():
            pieces[0].view(-1)[0] += 1

    real_unpack = exchange.Exchange.unpack
    message = "rank 1 wrote as a copy is not what rank 0"
    with (
        patch.object(exchange.Exchange, "unpack", spoiled),
        pytest.raises(ckpt.CheckpointError, match=message),
    ):
        hosts.tier().save(2, state_of(world, 2))
    world.barrier()
    assert _listing(tmp_path) == before


@ranks(2)
def test_hosts_that_share_a_folder_are_refused(tmp_path):
    world = Mesh().group("dp")
    tier = ckpt.LocalTier(tmp_path, group=world, hosts=["a", "b"])
    with pytest.raises((ValueError, OSError, ckpt.CheckpointError)):
        tier.save(1, state_of(world, 1))
    world.barrier()
    assert _listing(tmp_path) == {}


@ranks(2)
def test_what_cannot_be_saved_is_refused_on_all_ranks(tmp_path):
    world = Mesh().group("dp")
    tier = Hosts(tmp_path, ["a", "b"], world).tier()
    with pytest.raises(ValueError, match="must be a module"):
        tier.save(1, {"x": object() if world.rank else torch.ones(1)})
    with pytest.raises(ValueError, match=r"step must be the same on all ranks, not \[3, 4\]"):
        tier.save(3 + world.rank, {"x": torch.ones(1)})
    with pytest.raises(ValueError, match="step=-1 must be a whole number from 0 on"):
        tier.save(-1 if world.rank else 1, {"x": torch.ones(1)})
    assert _listing(tmp_path) == {}
    assert tier.load_newest({}) is None


@ranks(2)
def test_a_rank_that_is_missing_ends_the_save_within_the_timeout(tmp_path):
    hasty = Mesh(timeout=timedelta(seconds=2)).group("dp")
    tier = Hosts(tmp_path, ["a", "b"], hasty).tier()
    tier.save(1, {"x": torch.ones(1)})
    hasty.barrier()
    before = _listing(tmp_path)
    if hasty.rank == 0:
        with pytest.raises(RuntimeError):
            tier.save(2, {"x": torch.ones(1)})
        assert _listing(tmp_path) == before
    else:
        time.sleep(3)


@ranks(2)
def test_memory_is_bounded_by_a_few_batches(tmp_path):
    """What arrives and what is packed, at any one time, is a batch and not the part."""
    world = Mesh().group("dp")
    tier = Hosts(tmp_path, ["a", "b"], world).tier()
    tier._limit = 2**16
    sizes, rounds = [], []
    real = saving.Exchange

    def noted(outgoing, incoming, *, group):
        rounds.append(1)
        for pieces in (*outgoing.values(), *incoming.values()):
            sizes.append(sum(one.nbytes for one in pieces))
        return real(outgoing, incoming, group=group)

    with patch.object(saving, "Exchange", noted):
        tier.save(1, {"net": torch.nn.ParameterList(torch.ones(99, 99) for _ in range(9))})
    assert len(rounds) == 9 and max(sizes) <= 2**16


# Two ranks save over and over until one or both are killed; then two others load what is left.
_SAVE_UNTIL_KILLED = """
    import itertools, os, random, shutil, signal, sys, time, warnings, torch
    import torch.distributed as dist
    from datetime import timedelta
    from megablocks_core import ckpt
    from megablocks_core.groups import Group, Mesh

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = random.Random(sys.argv[2])

    def ranks(root, store, body):
        children = []
        for rank in range(2):
            if not (child := os.fork()):
                code = 1
                try:
                    dist.init_process_group(
                        "gloo", store=dist.FileStore(f"{root}/{store}", 2), rank=rank,
                        world_size=2, timeout=timedelta(seconds=20))
                    world = Mesh().group("dp")
                    body(world, ckpt.LocalTier(f"{root}/{rank}", group=world, hosts=["a", "b"]))
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        return children

    def save(root):
        def body(world, tier):
            for step in itertools.count(1):
                tier.save(step, {"x": torch.full((100_000 + world.rank,), float(step))})
                with open(f"{root}/durable{world.rank}", "ab") as file:
                    file.write(b".")
        return body

    def load(root):
        durable = min(os.path.getsize(f"{root}/durable{rank}") for rank in range(2))
        def body(world, tier):
            state = {"x": torch.zeros(100_000 + world.rank)}
            step = tier.load_newest(state)
            assert step in (durable, durable + 1), (step, durable)
            assert (state["x"] == step).all()
            tier.save(0, state)
            assert all(name.startswith("step-0.") for name in os.listdir(f"{root}/{world.rank}"))
            if world.rank == 0:
                print("left" if step == durable + 1 else "before", flush=True)
        return body

    for number in range(int(sys.argv[2])):
        root = os.path.join(sys.argv[1], str(number))
        os.mkdir(root)
        children = ranks(root, "first", save(root))
        while not all(os.path.exists(f"{root}/durable{rank}") for rank in range(2)):
            time.sleep(0.001)
        time.sleep(chosen.uniform(0, 0.03))
        for child in chosen.sample(children, chosen.choice([1, 2])):
            os.kill(child, signal.SIGKILL)
            time.sleep(chosen.choice([0, 0.002]))
        for child in children:
            os.waitpid(child, 0)
        if chosen.random() < 0.5:
            shutil.rmtree(f"{root}/{chosen.randrange(2)}")
        for child in ranks(root, "second", load(root)):
            assert os.waitpid(child, 0)[1] == 0, number
"""


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.drill)])
def test_sigkill_of_ranks_at_any_moment_leaves_the_last_save(tmp_path, kills):
    command = [sys.executable, "-c", textwrap.dedent(_SAVE_UNTIL_KILLED), tmp_path, str(kills)]
    done = subprocess.run(command, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == kills
