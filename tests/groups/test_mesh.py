"""A mesh names axes, refuses sizes and names that do not fit, and its groups talk."""

import copy
import pickle
import subprocess
import sys
from datetime import timedelta
from itertools import permutations
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.testing import ranks


def sum_of_ranks(group):
    return int(group.all_reduce(torch.tensor([dist.get_rank()])))


# One process, no torch.distributed.


def test_arithmetic_loads_no_torch():
    code = (
        "import sys, megablocks_core.groups as g; m = g.Mesh(world_size=4096, rank=17, tp=8, pp=16)"
        "; assert m.size('dp') == 32 and m.coordinate('tp') == 1 and m.expert.size('edp') == 256"
        "; assert m.group('cp') is g.LOCAL and g.Mesh().world_size == 1"
        "; assert m.ranks('pp')[17] == list(range(17, 4096, 256)), m.describe()"
        "; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_world_every_group_is_local():
    mesh = Mesh()
    assert (mesh.world_size, mesh.rank) == (1, 0)
    for group in [mesh.group("tp"), mesh.group("dp", "cp"), mesh.expert.group("ep")]:
        assert group is LOCAL and group.size == 1 and group.pg is None
    assert mesh.split("dp", inner=1) == (LOCAL, LOCAL)


def test_coordinates_and_sizes_of_both_views():
    mesh = Mesh(world_size=16, rank=13, tp=2, cp=2, pp=2, ep=4)
    assert [mesh.coordinate(axis) for axis in ("tp", "cp", "dp", "pp")] == [1, 0, 1, 1]
    assert [mesh.expert.size(axis) for axis in ("etp", "ep", "edp", "pp")] == [1, 4, 2, 2]
    assert [mesh.expert.coordinate(axis) for axis in ("etp", "ep", "edp", "pp")] == [0, 1, 1, 1]
    assert mesh.ranks("cp", "tp") == mesh.ranks("tp", "cp")


def test_sizes_above_one_need_a_world():
    with pytest.raises(ValueError, match="sizes above 1 need world_size= .* tp=2, cp=1, dp=-1"):
        Mesh(tp=2)
    with pytest.raises(ValueError, match="sizes above 1 need world_size="):
        Mesh(ep=2)
    with pytest.raises(ValueError, match="rank=1 must come with world_size="):
        Mesh(rank=1)
    with pytest.raises(ValueError, match=r"rank=4 must be in range\(world_size=4\)"):
        Mesh(world_size=4, rank=4)


def test_a_group_of_more_than_one_needs_torch_distributed():
    mesh = Mesh(world_size=4, rank=3, tp=2)
    with pytest.raises(RuntimeError, match=r"Mesh\(world_size=4, .* needs torch.distributed"):
        mesh.group("tp")
    with pytest.raises(RuntimeError, match="for its own rank unless rank= is given"):
        Mesh(world_size=4, tp=2).coordinate("tp")


def test_f_002b_etp_does_not_follow_tp():
    mesh = Mesh(world_size=4, tp=4, ep=4)
    assert mesh.expert.size("etp") == 1 and mesh.expert.size("edp") == 1


def test_f_003_a_split_that_does_not_divide_is_refused():
    mesh = Mesh(world_size=6, cp=3, dp=2)
    with pytest.raises(ValueError, match=r"inner=4 must divide cp \* dp=6"):
        mesh.split("dp", "cp", inner=4)


def test_f_004_an_axis_that_nobody_declared_is_named_with_those_declared():
    mesh = Mesh(world_size=8, tp=2, pp=2, dp=2)
    for ask in (mesh.group, mesh.ranks, mesh.size):
        with pytest.raises(ValueError, match="axis='ep' must be one of tp, cp, dp, pp"):
            ask("ep")
        with pytest.raises(ValueError, match=r"axis=\['tp'\] must be one of tp, cp, dp, pp"):
            ask(["tp"])
    with pytest.raises(ValueError, match="axis='tp' must be one of etp, ep, edp, pp"):
        mesh.expert.group("tp")


def test_an_order_that_moves_expert_stages_raises_only_for_experts():
    mesh = Mesh(world_size=8, rank=0, tp=2, dp=2, pp=2, ep=2, order="tp-pp-cp-dp")
    assert mesh.ranks("pp")[0] == [0, 2]
    with pytest.raises(ValueError, match="order='tp-pp-cp-dp' must give .* the same pp groups"):
        mesh.expert  # noqa: B018


def test_options_are_by_axis():
    with pytest.raises(ValueError, match=r"options=\['xp'\] must be axes"):
        Mesh(options={"xp": object()})


def test_a_mesh_does_not_change_and_copies_to_itself():
    mesh = Mesh(world_size=8, rank=3, tp=2, pp=2, ep=2, timeout=timedelta(seconds=5))
    for name in ("rank", "world_size", "expert", "tp"):
        with pytest.raises(AttributeError):
            setattr(mesh, name, 1)
    assert copy.deepcopy(mesh) is mesh
    again = pickle.loads(pickle.dumps(mesh))
    assert repr(again) == repr(mesh)
    assert repr(eval(repr(mesh))) == repr(mesh)


# On several ranks.


@ranks(4)
def test_groups_talk_to_their_ranks():
    mesh = Mesh(tp=2, ep=4)
    rank = dist.get_rank()
    tp, dp, both = mesh.group("tp"), mesh.group("dp"), mesh.group("dp", "tp")
    assert (tp.size, tp.rank, tp.ranks) == (2, rank % 2, (rank // 2 * 2, rank // 2 * 2 + 1))
    assert sum_of_ranks(tp) == [1, 1, 5, 5][rank]
    assert sum_of_ranks(dp) == [2, 4, 2, 4][rank]
    assert sum_of_ranks(both) == sum_of_ranks(mesh.expert.group("ep")) == 6
    assert mesh.group("cp") is LOCAL and mesh.expert.group("etp") is LOCAL


@ranks(2, 4)
def test_two_meshes_of_different_shape_live_side_by_side():
    world_size, rank = dist.get_world_size(), dist.get_rank()
    rows, columns = Mesh(tp=world_size), Mesh(dp=world_size)
    halves = Mesh(tp=2)
    for _ in range(2):
        assert sum_of_ranks(rows.group("tp")) == sum(range(world_size))
        assert columns.group("tp") is LOCAL
        assert sum_of_ranks(columns.group("dp")) == sum(range(world_size))
        assert sum_of_ranks(halves.group("tp")) == rank // 2 * 4 + 1
    halves.close()
    assert sum_of_ranks(rows.group("tp")) == sum(range(world_size))


@ranks(4)
def test_split_gives_shard_and_replicate_groups():
    shard, replicate = Mesh().split("dp", inner=2)
    rank = dist.get_rank()
    assert shard.ranks == [(0, 1), (2, 3)][rank // 2]
    assert replicate.ranks == [(0, 2), (1, 3)][rank % 2]
    assert sum_of_ranks(shard) == sum(shard.ranks)
    assert sum_of_ranks(replicate) == sum(replicate.ranks)


@ranks(2)
def test_f_007_a_world_that_does_not_match_raises_the_same_before_any_collective():
    """Proposed: a ValueError that lists the world and each size, with one text on all ranks."""
    with pytest.raises(ValueError, match="world_size=2, tp=4, cp=1, dp=-1, pp=1") as error:
        Mesh(tp=4)
    texts = [""] * 2
    dist.all_gather_object(texts, str(error.value))
    assert texts[0] == texts[1]
    for wrong in (Mesh(world_size=4, tp=2), Mesh(world_size=2, rank=1 - dist.get_rank(), tp=2)):
        with pytest.raises(ValueError, match="must be those of torch.distributed, 2 and"):
            wrong.group("tp")


@ranks(4)
def test_a_device_mesh_lends_its_groups():
    shape, names = (2, 2), ("dp", "tp")
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh = Mesh.from_device_mesh(device_mesh, ep=2)
    with patch.object(dist, "new_group", side_effect=AssertionError("made again")):
        for name in names:
            assert mesh.group(name).pg is device_mesh.get_group(name)
            assert mesh.coordinate(name) == device_mesh.get_local_rank(name)
        assert mesh.expert.group("ep").pg is device_mesh.get_group("tp")
    mesh.close()
    assert sum_of_ranks(Mesh.from_device_mesh(device_mesh).group("dp")) == [2, 4, 2, 4][mesh.rank]
    for ranks_of_it in ([3, 2, 1, 0], [1, 0, 2, 3]):
        backwards = DeviceMesh("cpu", ranks_of_it, mesh_dim_names=("tp",))
        with pytest.raises(ValueError, match="must hold every rank, ascending"):
            Mesh.from_device_mesh(backwards)
    with pytest.raises(ValueError, match="world_size must be tp"):
        Mesh.from_device_mesh(device_mesh["tp"])


@ranks(4)
def test_a_hybrid_device_mesh_lends_the_groups_of_the_split():
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    mesh = Mesh.from_device_mesh(device_mesh)
    with patch.object(dist, "new_group", side_effect=AssertionError("made again")):
        shard, replicate = mesh.split("dp", inner=2)
    assert shard.pg is device_mesh.get_group("dp_shard")
    assert replicate.pg is device_mesh.get_group("dp_replicate")


@ranks(4)
def test_to_device_mesh_has_the_same_groups():
    mesh = Mesh(tp=2)
    device_mesh = mesh.to_device_mesh()
    assert device_mesh.mesh_dim_names == ("dp", "tp")
    for axis in ("dp", "tp"):
        assert device_mesh[axis].get_group() is mesh.group(axis).pg
        assert device_mesh.get_local_rank(axis) == mesh.coordinate(axis)
    assert device_mesh.mesh.tolist() == [[0, 1], [2, 3]]


@ranks(2)
@pytest.mark.parametrize("device_type", [None, "cpu", "cuda"])
def test_to_device_mesh_takes_the_type_of_device(device_type):
    """By default that of the back end; another is only said, and no device is touched."""
    mesh = Mesh(tp=2)
    device_mesh = mesh.to_device_mesh(device_type)
    assert device_mesh.device_type == (device_type or "cpu")
    assert device_mesh.get_group() is mesh.group("tp").pg
    assert not torch.cuda.is_initialized()


@ranks(1)
def test_a_mesh_of_one_rank_is_no_device_mesh():
    with pytest.raises(ValueError, match="must have an axis larger than 1"):
        Mesh().to_device_mesh()


@ranks(4)
def test_describe_tells_sizes_groups_and_communicators():
    mesh = Mesh(tp=2, ep=2)
    for group in (mesh.group("tp"), mesh.expert.group("ep"), mesh.group("tp", "dp")):
        assert group.size > 1
    if mesh.rank == 3:
        assert mesh.describe() == (
            "4 ranks, fastest axis first\n"
            "dense:  tp=2, cp=1, dp=2, pp=1\n"
            "expert: etp=1, ep=2, edp=2, pp=1\n"
            "group('tp'): [2, 3]\n"
            "expert.group('ep'): [2, 3]\n"
            "group('tp', 'dp'): [0, 1, 2, 3]\n"
            "2 communicators on this rank, 1 made here"
        )


def test_ranks_are_those_of_megatron():
    """Dense and expert groups, joint ones too, in every order of the axes."""
    peers = pytest.importorskip("megatron.core.parallel_state", reason="oracle megatron")
    for order in permutations(("tp", "cp", "dp", "pp")):
        sizes = {"tp": 2, "cp": 2, "dp": 3, "pp": 2}
        mesh = Mesh(world_size=24, rank=0, **sizes, ep=3, etp=2, order="-".join(order))
        theirs = peers.RankGenerator(**sizes, ep=1, order="-".join((*order, "ep")))
        for axes in (("tp",), ("cp",), ("dp",), ("pp",), ("tp", "cp"), ("dp", "cp"), ("tp", "pp")):
            assert mesh.ranks(*axes) == theirs.get_ranks("-".join(axes)), (order, axes)
        if order.index("pp") < 3:
            continue  # the two factorizations agree on the stages where these come last
        expert_order = "-".join("ep-dp" if axis == "dp" else axis for axis in order)
        theirs = peers.RankGenerator(tp=2, ep=3, dp=2, pp=2, cp=1, order=expert_order)
        for ours, its in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("pp", "pp")):
            assert mesh.expert.ranks(ours) == theirs.get_ranks(its), (order, ours)


@pytest.mark.parametrize("world_size", [None, 4])
@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp", "ep", "etp"])
@pytest.mark.parametrize("size", ["2", 2.0, float("nan"), None])
def test_a_size_that_is_no_number_is_named_with_its_value_and_the_rule(world_size, axis, size):
    with pytest.raises(ValueError, match=rf"{axis}={size!r} must be a positive whole number"):
        Mesh(world_size=world_size, **{axis: size})
