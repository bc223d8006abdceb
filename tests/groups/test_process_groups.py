"""Groups are made once, by all ranks alike, as asked; what would make ranks wait raises."""

from datetime import timedelta
from time import monotonic
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks

SOON = timedelta(seconds=5)


def sum_of_ranks(group):
    return int(group.all_reduce(torch.tensor([dist.get_rank()])))


def test_a_fake_world_has_groups_that_no_other_rank_agreed_on():
    dist.init_process_group("fake", store=HashStore(), rank=5, world_size=256)
    try:
        mesh = Mesh(tp=4, pp=8, ep=16)
        assert mesh.group("tp").ranks == (4, 5, 6, 7)
        assert mesh.group("dp").ranks == tuple(range(1, 32, 4))
        assert mesh.expert.group("ep").ranks == tuple(range(16))
    finally:
        dist.destroy_process_group()


@ranks(4)
def test_equal_ranks_share_one_group_within_a_mesh():
    mesh = Mesh(tp=2, ep=2)
    assert mesh.group("tp") is mesh.group("tp") is mesh.expert.group("ep")
    assert mesh.group("dp") is mesh.expert.group("edp")
    assert mesh.split("dp", "tp", inner=2) == (mesh.group("tp"), mesh.group("dp"))
    with patch.object(dist, "new_group", side_effect=AssertionError("made again")):
        assert mesh.group("tp", "pp") is mesh.group("cp", "tp") is mesh.group("tp")
    assert Mesh(tp=2).group("tp") != mesh.group("tp")


@ranks(4)
def test_timeout_and_options_reach_every_group():
    timeout = timedelta(seconds=77)
    options = {"tp": {"of": "tp"}, "dp": {"of": "dp"}, "edp": {"of": "edp"}}
    mesh = Mesh(tp=2, ep=2, timeout=timeout, options=options)
    given, new_group = [], dist.new_group

    def spy(ranks, *, pg_options, **others):
        given.append(pg_options)
        return new_group(ranks, **others)

    def of(group):
        seconds = group.pg._get_backend(torch.device("cpu")).options._timeout
        assert seconds == timeout
        names = {options["of"] for options in given}
        given.clear()
        return names

    with patch.object(dist, "new_group", spy):
        assert of(mesh.group("tp")) == {"tp"}
        assert of(mesh.group("dp", "tp")) == {"tp"}  # all ranks, yet a group of its own
        assert of(mesh.group("dp")) == {"dp"}
        assert of(mesh.expert.group("ep")) == {"dp"}
        mesh.expert.group("edp", "pp")
        assert all(one is not options["edp"] for one in given)  # each group has a copy
        assert of(mesh.expert.group("edp")) == {"edp"}
        assert of(mesh.split("tp", "dp", inner=4)[0]) == set()  # made above


@ranks(2)
def test_a_group_of_all_ranks_is_the_default_one_unless_it_differs():
    assert Mesh(tp=2).group("tp").pg is dist.group.WORLD
    assert Mesh(tp=2, timeout=SOON).group("tp").pg is not dist.group.WORLD
    spare = Mesh(dp=2)
    spare.group("dp")
    spare.close()
    assert sum_of_ranks(Mesh(dp=2).group("dp")) == 1


@ranks(4)
def test_ranks_that_ask_in_another_order_raise_everywhere_in_bounded_time():
    mesh = Mesh(tp=2, timeout=timedelta(seconds=30))
    start = monotonic()
    for axis in ("tp", "dp") if dist.get_rank() == 2 else ("dp", "tp"):
        with pytest.raises(RuntimeError) as error:
            mesh.group(axis)
        for asked in ("group('tp') making [[0, 1], [2, 3]]", "group('dp') making [[0, 2], [1, 3]]"):
            assert asked in str(error.value)
    assert monotonic() - start < 20
    assert sum_of_ranks(mesh.group("tp")) == dist.get_rank() // 2 * 4 + 1


@ranks(2)
def test_ranks_whose_meshes_differ_raise_even_where_their_groups_are_equal():
    mesh = Mesh(tp=2) if dist.get_rank() == 0 else Mesh(dp=2)
    with pytest.raises(RuntimeError, match="must ask for the same groups .* tp=2.* dp=2|tp=1"):
        mesh.group("tp" if dist.get_rank() == 0 else "dp")


@ranks(3)
def test_a_missing_rank_is_named_and_the_rest_can_go_on_afterwards():
    mesh = Mesh(timeout=SOON)
    if dist.get_rank() != 1:
        with pytest.raises(RuntimeError, match=r"group\('dp'\) making .* ranks \[1\] for none"):
            mesh.group("dp")
        dist.barrier()
    else:
        dist.barrier()  # comes when the others have given up
        with pytest.raises(RuntimeError, match=r"group\('dp'\) making .* ranks \[1\] for none"):
            mesh.group("dp")
    dist.barrier()
    assert sum_of_ranks(mesh.group("dp")) == 3


@ranks(2)
def test_close_destroys_what_was_made_and_asking_again_makes_it_again():
    mesh = Mesh(timeout=timedelta(seconds=20))
    old = mesh.group("dp")
    pg = old.pg
    mesh.close()
    with pytest.raises(RuntimeError, match="its mesh was closed"):
        sum_of_ranks(old)
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(pg)
    assert sum_of_ranks(mesh.group("dp")) == 1
    mesh.close()
    mesh.close()


@ranks(2)
def test_groups_of_a_world_that_ended_are_made_anew(tmp_path):
    mesh = Mesh(dp=2, timeout=timedelta(seconds=20))
    old, rank = mesh.group("dp"), mesh.rank
    dist.barrier()
    dist.destroy_process_group()
    store = FileStore(str(tmp_path / "second"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert mesh.group("dp") != old
    assert sum_of_ranks(mesh.group("dp")) == 1
