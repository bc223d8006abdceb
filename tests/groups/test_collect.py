"""Whole tensors reach the ranks that they are for, each element once, whatever the cut."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard

from megablocks_core.groups import (
    LOCAL,
    Collection,
    Group,
    Held,
    Mesh,
    Segment,
    ShardSpec,
    collect,
    own_slices,
)
from megablocks_core.groups.collect import first_holders
from megablocks_core.testing import ranks


@given(
    first=st.integers(0, 9),
    shared=st.integers(1, 4),
    parts=st.sampled_from([1, 2]),
    other=st.integers(1, 4),
    dim=st.integers(0, 1),
    num_ranks=st.sampled_from([2, 4, 8]),
)
def test_first_holders_cover_every_element_once(first, shared, parts, other, dim, num_ranks):
    group = Group(tuple(range(num_ranks)))
    segments = (Segment(first), Segment(shared * parts, parts=parts))
    specs = (ShardSpec(dim, group, segments=segments),)
    lengths = [other, first + shared * parts] if dim else [first + shared * parts, other]
    boxes = [
        [whole for whole, _ in own_slices(specs, tuple(lengths), {group: rank})]
        for rank in range(num_ranks)
    ]
    seen = torch.zeros(lengths)
    for rank, box in first_holders(boxes):
        seen[box] += 1
        mine = torch.zeros(lengths)
        for held in boxes[rank]:
            mine[held] = 1
        assert mine[box].all()
    assert (seen == 1).all()


@ranks(1, 2, 4)
def test_cut_packed_and_replicated_tensors_arrive_whole():
    size = dist.get_world_size()
    group = Mesh(tp=size).group("tp")
    shared = Segment(4, parts=min(size, 2))
    cuts = {
        "rows": (ShardSpec(0, group),),
        "columns": (ShardSpec(1, group),),
        "packed": (ShardSpec(0, group, segments=(Segment(4), shared)),),
        "uneven": (ShardSpec(1, group, segments=(Segment(5),)),),
        "replicated": (),
    }
    shapes = {"uneven": (3, 5)}
    dtypes = {"rows": torch.bfloat16, "packed": torch.float64}
    wholes = {
        name: torch.arange(64)
        .view(8, 8)
        .to(dtypes.get(name, torch.float32))[
            tuple(slice(length) for length in shapes.get(name, (8, 8)))
        ]
        for name in cuts
    } | {"scalar": torch.tensor(3), "empty": torch.empty(0, 4)}
    held = [
        Held(name, _share(whole, cuts.get(name, ())), cuts.get(name, ()))
        for name, whole in wholes.items()
    ]

    collection = Collection(held, group=group, task="test", raises=RuntimeError)
    arrived = {}
    collection.visit(_wholes(collection), _keep(arrived))

    assert [whole.dtype.itemsize for whole in collection.wholes] == [8, 8, 4, 4, 4, 4, 2]
    assert list(arrived) == [whole.name for whole in collection.wholes if group.rank == 0]
    for name in arrived:
        assert torch.equal(arrived[name], wholes[name]), name


@ranks(1, 2, 4)
def test_tensors_go_to_several_owners_in_order():
    """Each owner gets its own, in rounds that have some for all; what it holds is not sent."""
    size = dist.get_world_size()
    group = Mesh(tp=size).group("tp")
    names = [f"t{number}" for number in range(11)]
    torch.manual_seed(0)
    wholes = {name: torch.randn(4 + 4 * index, 4) for index, name in enumerate(names)}
    cut = (ShardSpec(0, group),)
    held = [Held(name, _share(wholes[name], cut), cut) for name in names[:8]]
    held += [Held(name, wholes[name]) for name in names[8:]]
    owners = {name: [index % size] for index, name in enumerate(names)}
    owners["t3"], owners["t5"] = list(range(size)), []
    collection = Collection(held, group=group, task="test", raises=RuntimeError)
    arrived, sent = {}, []
    exchange = dist.all_to_all_single

    def counted(received, given, *args, **options):
        sent.append(given.numel())
        exchange(received, given, *args, **options)

    with (
        patch.object(dist, "all_to_all_single", counted),
        patch.object(collect, "ROUND_BYTES", 1500),
    ):
        collection.visit(_wholes(collection, owners), _keep(arrived))
    assert list(arrived) == [name for name in names if group.rank in owners[name]]
    assert all(torch.equal(whole, wholes[name]) for name, whole in arrived.items())
    right = sum(
        one.tensor.numel() * 4 * sum(owner != group.rank for owner in owners[one.name])
        for one in held[:8]
    )
    assert sum(sent) == right


@ranks(1, 2, 4)
def test_boxes_arrive_together_in_rounds_of_bounded_bytes(monkeypatch):
    """No rank sends and gets more in a round than is allowed, unless one delivery is more."""
    size, limit = dist.get_world_size(), 600
    group = Mesh(tp=size).group("tp")
    rows, columns = torch.randn(16, 12), torch.randn(12, 8).double()
    cuts = {"rows": (ShardSpec(0, group),), "columns": (ShardSpec(1, group),)}
    wholes = {"rows": rows, "columns": columns, "empty": torch.empty(0, 4)}
    dist.broadcast(rows, 0)
    dist.broadcast(columns, 0)
    held = [
        Held(name, _share(x, cuts.get(name, ())), cuts.get(name, ())) for name, x in wholes.items()
    ]
    boxes = [
        [("rows", (slice(at, at + 3), slice(2, 11))), ("columns", (slice(at, at + 1), slice(1, 8)))]
        for at in range(0, 12, 2)
    ]
    boxes += [[("empty", (slice(0, 0), slice(1, 3)))], [], [("rows", (slice(0, 16), slice(0, 12)))]]
    wanted = {
        owner: [((owner, number), named) for number, named in enumerate(boxes)]
        for owner in range(size)
    }
    collection = Collection(held, group=group, task="test", raises=RuntimeError)
    got, rounds = [], []
    exchange, planned = Collection._exchanged, Collection._rounds
    loads: list[int] = []

    def counted(self, deliveries, outgoing):
        loads.append(sum(len(piece) for pieces in outgoing for piece in pieces))
        own = [one for one in deliveries if one.owner == group.rank]
        loads.extend(part.nbytes(part.box) for one in own for part in one.parts)
        return exchange(self, deliveries, outgoing)

    def noted(self, wanted):
        for one in planned(self, wanted):
            yield one
            rounds.append((len(one), sum(loads)))
            loads.clear()

    def consume(key, values):
        assert key == (group.rank, len(got))
        for (name, box), found in zip(boxes[key[1]], values, strict=True):
            assert found.dtype == wholes[name].dtype and torch.equal(found, wholes[name][box])
        got.append(key)

    monkeypatch.setattr(collect, "ROUND_BYTES", limit)
    monkeypatch.setattr(Collection, "_exchanged", counted)
    monkeypatch.setattr(Collection, "_rounds", noted)
    collection.visit(wanted, consume)
    assert len(got) == len(boxes) and len(rounds) > 2
    assert all(nbytes <= limit for count, nbytes in rounds if count > 1), rounds
    assert max(count for count, _ in rounds) > 1


@ranks(4)
def test_dtensors_are_cut_by_their_placements_inside_the_marks():
    mesh = Mesh(tp=2, dp=2)
    model, whole = torch.nn.Module(), torch.arange(42.0).view(14, 3)
    spec = ShardSpec(0, mesh.group("tp"), (Segment(10), Segment(4)))
    model.weight = torch.nn.Parameter(torch.cat([whole[part] for part in spec.ranges(14)]))
    fully_shard(model, mesh=mesh.to_device_mesh()["dp"])  # 7 rows over two ranks: 4 and 3
    world = mesh.group("tp", "dp")
    held = [Held("w", model.weight, (spec,))]
    arrived = {}
    collection = Collection(held, group=world, task="test", raises=RuntimeError)
    collection.visit(_wholes(collection), _keep(arrived))
    assert world.rank or torch.equal(arrived["w"], whole)


@ranks(2)
def test_a_tensor_that_one_rank_alone_holds_arrives():
    group = Mesh().group("dp")
    held = [Held(f"of.{group.rank}", torch.full((2,), group.rank))]
    arrived = {}
    collection = Collection(held, group=group, task="test", raises=RuntimeError)
    collection.visit(_wholes(collection), _keep(arrived))
    found = {name: whole.tolist() for name, whole in arrived.items()}
    assert found == ({"of.0": [0, 0], "of.1": [1, 1]} if group.rank == 0 else {})


@ranks(2)
def test_f_160_elements_that_no_rank_holds_are_refused():
    group = Mesh().group("dp")
    half = Group((group.rank, 9), rank=0)  # the other half lies on a rank that is not asked
    with pytest.raises(ValueError, match=r"must include the ranks \[[01], 9\] that hold w"):
        Collection(
            [Held("w", torch.ones(2, 3), (ShardSpec(0, half),))],
            group=group,
            task="test",
            raises=RuntimeError,
        )
    rows = [Held("w", torch.ones(2, 3), (ShardSpec(0, group),))] if group.rank == 0 else []
    with pytest.raises(ValueError, match="w: the group holds 6 of the 12 elements"):
        Collection(rows, group=group, task="test", raises=RuntimeError)


@ranks(2)
def test_ranks_that_disagree_on_a_shape_are_refused():
    group = Mesh().group("dp")
    with pytest.raises(ValueError, match=r"ranks disagree on w"):
        Collection(
            [Held("w", torch.ones(2 + group.rank))], group=group, task="test", raises=RuntimeError
        )


def test_meta_is_refused():
    with pytest.raises(ValueError, match="w is on meta"):
        Collection(
            [Held("w", torch.ones(2, device="meta"))],
            group=LOCAL,
            task="test",
            raises=RuntimeError,
        )


@ranks(2)
def test_an_error_of_the_consumer_raises_on_all():
    group = Mesh().group("dp")
    held = [Held("w", torch.ones(2, 3), (ShardSpec(0, group),))]
    collection = Collection(held, group=group, task="write", raises=RuntimeError)

    def consume(name, values):
        raise OSError("disk full")

    with pytest.raises(OSError if group.rank == 0 else RuntimeError, match="disk full"):
        collection.visit(_wholes(collection), consume)


def _wholes(collection, owners=None):
    """Every tensor as a whole, for the first rank or for its owners."""
    return {
        owner: [
            (whole.name, [(whole.name, tuple(slice(0, size) for size in whole.shape))])
            for whole in collection.wholes
            if owner in (owners or {}).get(whole.name, (0,))
        ]
        for owner in range(dist.get_world_size())
    }


def _keep(arrived):
    def consume(name, values):
        (arrived[name],) = (one.clone() for one in values)

    return consume


def _share(whole, specs):
    boxes = own_slices(specs, tuple(whole.shape))
    if not specs:
        return whole.clone()
    dim = specs[0].dim
    return (
        torch.cat([whole[theirs] for theirs, _ in boxes], dim) if boxes else whole.narrow(dim, 0, 0)
    )
