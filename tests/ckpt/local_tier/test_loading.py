"""A run resumes from what is left on the hosts, or is told what is not."""

import warnings

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.local_tier import loading
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from tests.ckpt.flat_optimizer import FlatAdam
from tests.ckpt.local_tiers import Hosts, Net, assert_holds, state_of


@ranks(4)
@pytest.mark.parametrize("copies", [1, 2])
def test_any_hosts_may_be_lost_as_many_as_there_are_copies(tmp_path, copies):
    world = Mesh().group("dp")
    for lost in ([], ["a"], ["b"], ["c"], ["a", "b"], ["b", "c"]):
        hosts = Hosts(tmp_path / "-".join(lost), ["a", "a", "b", "c"], world, copies=copies)
        hosts.tier().save(3, state_of(world, 1))
        hosts.tier().save(5, state_of(world, 2))
        hosts.lose(*lost)
        state = state_of(world, 9, steps=0)
        if len(lost) <= copies:
            assert hosts.tier().load_newest(state) == 5
            assert_holds(world, state, 2)
        else:
            message = r"step 5: no folder has the parts of ranks \[.*\] of 4"
            with pytest.raises(ckpt.CheckpointError, match=message):
                hosts.tier().load_newest(state)
            assert state["rank"] == [world.rank, 9]
        world.barrier()


@ranks(3)
def test_hosts_of_uneven_size(tmp_path):
    """The host of one rank keeps the copies of both ranks of the other."""
    world = Mesh().group("dp")
    for lost in ("a", "b"):
        hosts = Hosts(tmp_path / lost, ["a", "a", "b"], world)
        hosts.tier().save(1, state_of(world, 4))
        hosts.lose(lost)
        state = state_of(world, 9)
        assert hosts.tier().load_newest(state) == 1
        assert_holds(world, state, 4)
        hosts.tier().save(2, state)  # makes the lost copies again
        world.barrier()
        assert len(hosts.parts("a")) == len(hosts.parts("b")) == 3
        world.barrier()


@ranks(2)
def test_ranks_that_find_themselves_on_other_hosts_get_their_parts(tmp_path):
    world = Mesh().group("dp")
    Hosts(tmp_path, ["a", "b"], world, copies=0).tier().save(1, state_of(world, 4))
    state = state_of(world, 9)
    world.barrier()
    assert Hosts(tmp_path, ["b", "a"], world, copies=0).tier().load_newest(state) == 1
    assert_holds(world, state, 4)


@ranks(2)
@pytest.mark.parametrize("place", [-1, 9, "manifest.json"])
def test_a_flipped_bit_is_found_and_the_copy_taken(tmp_path, place):
    world = Mesh().group("dp")
    hosts = Hosts(tmp_path, ["a", "b"], world)
    hosts.tier().save(1, state_of(world, 4))

    def flip(name="a", rank="00000"):
        (folder,) = hosts.parts(name, rank=rank)
        is_text = place == "manifest.json"
        path = folder / (place if is_text else "part.safetensors")
        data = bytearray(path.read_bytes())
        data[20 if is_text else place] ^= 4
        path.write_bytes(data)

    hosts.alone(flip)
    state = state_of(world, 9)
    with warnings.catch_warnings(record=True) as caught:
        assert hosts.tier().load_newest(state) == 1
    assert_holds(world, state, 4)
    if world.rank == 0:
        assert any("damaged" in str(one.message) for one in caught)
    hosts.alone(lambda: flip("b"))
    with pytest.raises(ckpt.CheckpointError, match=r"ranks \[0\] of 2|rank 0 cannot be read"):
        hosts.tier().load_newest(state)


@ranks(2)
def test_where_all_copies_are_damaged_the_save_before_is_loaded(tmp_path):
    world = Mesh().group("dp")
    hosts = Hosts(tmp_path, ["a", "b"], world, keep_last=2)
    for step in (1, 2, 3):
        hosts.tier().save(step, state_of(world, step))

    def flip():
        for name in "ab":
            (folder,) = hosts.parts(name, step=3, rank="00001")
            path = folder / "part.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"!")

    hosts.alone(flip)
    state = state_of(world, 9)
    with warnings.catch_warnings(record=True) as caught:
        assert hosts.tier().load_newest(state) == 2
    assert_holds(world, state, 2)
    if world.rank == 0:
        assert "passed over step 3: the part of rank 1 cannot be read" in str(caught[-1].message)


@ranks(2)
def test_a_save_that_did_not_reach_all_hosts_is_passed_over(tmp_path):
    world = Mesh().group("dp")
    hosts = Hosts(tmp_path, ["a", "b"], world, copies=0, keep_last=2)
    hosts.tier().save(1, state_of(world, 1))
    hosts.tier().save(2, state_of(world, 2))
    hosts.alone(lambda: [(path / "manifest.json").unlink() for path in hosts.parts("b", step=2)])
    state = state_of(world, 9)
    with warnings.catch_warnings(record=True) as caught:
        assert hosts.tier().load_newest(state) == 1
    assert_holds(world, state, 1)
    if world.rank == 0:
        text = "passed over step 2: no folder has the parts of ranks [1] of 2"
        assert text in str(caught[-1].message)
    # The next save counts as newer whatever its number, and what was passed over goes.
    hosts.tier().save(1, state_of(world, 7))
    assert hosts.tier().load_newest(state) == 1
    assert_holds(world, state, 7)
    assert len(hosts.parts("a")) == 2 and hosts.parts("a", step=2) == []


@ranks(2)
def test_another_state_or_layout_is_refused_on_all_ranks_and_nothing_changed(tmp_path):
    world = Mesh().group("dp")
    hosts = Hosts(tmp_path, ["a", "b"], world)
    hosts.tier().save(1, state_of(world, 4))
    tier = hosts.tier()

    def refused(change, message):
        state = state_of(world, 9)
        change(state)
        with pytest.raises(ValueError, match=message):
            tier.load_newest(state)
        assert (state["net"].norm.flatten()[0] != 4).all()

    refused(lambda state: state.pop("own"), "own is lacking")
    refused(lambda state: state.update(more=1), "more was not saved")
    refused(lambda state: state.update(own=state["own"][:2]), r"own has shape \(2, 2\), saved")
    refused(lambda state: state.update(own=state["own"].float()), "own has dtype")
    if world.rank == 0:
        refused(lambda state: None, "on rank 1: own is lacking")
    else:
        refused(lambda state: state.pop("own"), "own is lacking")

    def cut_otherwise(state):
        state["net"] = Net(world, 9.0, dim=1)
        state["adam"] = torch.optim.AdamW([state["net"].rows])
        state["flat"] = FlatAdam([[state["net"].norm]], group=world)

    refused(cut_otherwise, "net/rows is cut otherwise than it was saved")
    world.barrier()
    if world.rank == 0:  # one rank has found all parts of two
        alone = ckpt.LocalTier(tmp_path / "a", copies=0)
        with pytest.raises(ValueError, match="saved by 2 ranks and this group has 1"):
            alone.load_newest({})


@ranks(2)
def test_an_error_of_one_rank_that_is_no_damage_is_raised_on_all(tmp_path):
    """A rank that gave up for want of memory is not left behind by ranks that try an older save."""
    world = Mesh().group("dp")
    hosts = Hosts(tmp_path, ["a", "b"], world, keep_last=2)
    for step in (1, 2):
        hosts.tier().save(step, state_of(world, step))
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(loading._Served, "read", _no_memory)
        with pytest.raises((MemoryError, ckpt.CheckpointError), match="no memory"):
            hosts.tier().load_newest(state_of(world, 9))
    assert hosts.tier().load_newest(state_of(world, 9)) == 2


def _no_memory(*_):
    raise MemoryError("no memory")
