"""Shares name every element that a rank holds, and views of its memory, however it is cut."""

import warnings
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial

from megablocks_core.ckpt.plans.outlines import holdings, pack
from megablocks_core.ckpt.state.shares import (
    Name,
    Share,
    flat_shares,
    joined,
    number_shares,
    tensor_shares,
)
from megablocks_core.groups import LOCAL, Group, Mesh, Segment, ShardSpec, Specs, load_slices
from megablocks_core.testing import ranks

NAME = Name("model", "a")


def _numbers(shape):
    return torch.arange(float(prod(shape))).reshape(shape)


def _assert_whole(shares, wholes, group):
    """The ranks' shares have the values of ``wholes`` (by name) and make them whole."""
    for share in shares:
        for box, view in share.pieces:
            assert torch.equal(view, wholes[share.name][box]), share.name
            assert torch.equal(share.view(box), view)
    found = holdings(group.all_gather_object(pack([share.outline for share in shares])))
    assert {one.name: one.shape for one in found} == {
        name: tuple(whole.shape) for name, whole in wholes.items()
    }
    assert all(one.layout.covered for one in found)


@ranks(1, 2, 4)
def test_marks_packed_with_copies_and_twice_on_one_dimension():
    world = Mesh().group("dp")
    size = world.size
    mesh = Mesh(tp=min(size, 2))
    copies = Segment(4, parts=min(size, 2))
    for shape, specs in (
        ((8, 6), [ShardSpec(0, world)]),
        ((3, 8), [ShardSpec(1, world)]),
        ((12, 2), [ShardSpec(0, world, segments=(Segment(8), copies))]),
        ((7, 2), [ShardSpec(0, world, segments=(Segment(7),))]),
        ((8, 4), [ShardSpec(0, mesh.group("tp")), ShardSpec(0, mesh.group("dp"))]),
        ((), []),
        ((0, 3), []),
    ):
        whole = _numbers(shape)
        local = list(shape)
        for spec in specs:
            local[spec.dim] = spec.held_length(local[spec.dim])
        tensor = torch.zeros(local)
        load_slices(tensor, tuple(specs), whole)
        shares = tensor_shares(NAME, tensor, tuple(specs), group=world)
        _assert_whole(shares, {"model/a": whole}, world)
        for _, view in shares[0].pieces:
            view.zero_()  # a view of the memory itself
        assert not tensor.any()


@ranks(4)
def test_placements_of_a_dtensor_and_of_fsdp_inside_tensor_parallel():
    world = Group.of(dist.group.WORLD)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for shape, placements in (
        ((8, 6), [Shard(0), Shard(1)]),
        ((7, 5), [Shard(0), Shard(0)]),
        ((7, 5), [Replicate(), Shard(-1)]),
    ):
        whole = _numbers(shape)
        tensor = distribute_tensor(whole, mesh, placements)
        _assert_whole(tensor_shares(NAME, tensor, (), group=world), {"model/a": whole}, world)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.Linear(5, 8, bias=False)
        nn.init.constant_(layer.weight, 0)
        with torch.no_grad():
            layer.weight += _numbers((8, 5))
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        fully_shard(layer, mesh=mesh["dp"])
    weight: Any = layer.weight
    assert "_Strided" in repr(weight.placements)
    shares = tensor_shares(NAME, layer.weight, (), group=world)
    assert torch.equal(weight.full_tensor(), _numbers((8, 5)))
    _assert_whole(shares, {"model/a": _numbers((8, 5))}, world)


@ranks(4)
def test_fsdp_inside_marks():
    world, mesh = Group.of(dist.group.WORLD), Mesh(tp=2)
    tp, dp = mesh.group("tp"), mesh.group("dp")
    layer = nn.Linear(5, 7, bias=False)  # this rank's half of 14 rows, cut unevenly again
    whole = _numbers((14, 5))
    with torch.no_grad():
        layer.weight.copy_(whole[7 * tp.rank :][:7])
    fully_shard(layer, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"])
    assert isinstance(layer.weight, DTensor) and dp.size == 2
    shares = tensor_shares(NAME, layer.weight, (ShardSpec(0, tp),), group=world)
    _assert_whole(shares, {"model/a": whole}, world)


@ranks(1, 2, 4)
def test_f164_a_stack_comes_apart_by_the_global_number_of_the_expert():
    ep = Group.of(dist.group.WORLD) if dist.get_world_size() > 1 else LOCAL
    whole = _numbers((8, 3, 2))
    specs = Specs((ShardSpec(0, ep),), each="experts.{}.up.weight", expert=True)
    tensor = whole.tensor_split(ep.size)[ep.rank].clone()
    name = Name("optimizer/model", "moe.experts.up", "exp_avg")
    names = [f"optimizer/model/moe.experts.{row}.up.weight/exp_avg" for row in range(8)]
    wholes = dict(zip(names, whole, strict=True))
    _assert_whole(tensor_shares(name, tensor, specs, group=ep), wholes, ep)
    half = tensor.numel() // 2 + 1
    halves = [
        flat_shares(name, part, flat, specs, local_shape=tuple(tensor.shape), group=ep)
        for part, flat in (
            (tensor.reshape(-1)[:half], (0, half)),
            (tensor.reshape(-1)[half:], (half, tensor.numel())),
        )
    ]
    shares = joined(share for part in halves for share in part)
    _assert_whole(shares, wholes, ep)
    assert all(share.pieces and not share.whole for share in shares)
    step = torch.tensor(3.0)
    shares = number_shares(name, step, specs, local_shape=tuple(tensor.shape))
    _assert_whole(shares, dict.fromkeys(names, step), ep)


@given(st.data())
def test_flat_ranges_of_any_cut(data):
    """Two ranks of a pretended group, whose shares are flattened and cut once more."""
    shape = data.draw(st.sampled_from([(4, 6), (2, 3, 4), (12,)]))
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole, shares = _numbers(shape), []
    pair = [Group((0, 1), rank=rank) for rank in range(2)]
    segments = (Segment(shape[dim] // 2), Segment(shape[dim] - shape[dim] // 2))
    for group in pair:
        specs = (ShardSpec(dim, group, segments),)
        local = list(shape)
        local[dim] = specs[0].held_length(shape[dim])
        tensor = torch.zeros(local)
        load_slices(tensor, specs, whole)
        ends = [0, *sorted(data.draw(st.lists(st.integers(0, tensor.numel()), max_size=3)))]
        for start, stop in zip(ends, [*ends[1:], tensor.numel()], strict=True):
            part = torch.cat([tensor.reshape(-1)[start:stop], torch.full((2,), -1.0)])
            flat = (start, stop + 2) if stop == tensor.numel() else (start, stop)
            part = part[: flat[1] - start]
            shares += flat_shares(NAME, part, flat, specs, local_shape=tuple(local), group=pair[0])
    for share in shares:
        for box, view in share.pieces:
            assert torch.equal(view, whole[box])
    (found,) = holdings([pack([share.outline]) for share in shares])
    assert found.layout.covered and found.layout.copies.max() == 1


def test_f157_padding_past_the_end_is_clipped():
    for flat, held in (((10, 18), [slice(10, 12)]), ((12, 20), []), ((0, 8), [slice(0, 8)])):
        (share,) = flat_shares(
            NAME, torch.arange(8.0) + flat[0], flat, (), local_shape=(12,), group=LOCAL
        )
        assert [box for box, _ in share.pieces] == [(part,) for part in held]
        assert all(torch.equal(view, torch.arange(12.0)[box]) for box, view in share.pieces)
    (share,) = flat_shares(NAME, torch.ones(2), (1, 3), (), local_shape=(), group=LOCAL)
    assert share.pieces == []  # the one element of a number lies on another rank


@pytest.mark.parametrize(
    ("flat", "length"), [((10, 18), 2), ((0, 4), 5), ((-1, 3), 4), ((5, 4), 0), ((0, 4), (2, 2))]
)
def test_f156_a_range_that_its_tensor_does_not_have_is_refused(flat, length):
    with pytest.raises(ValueError, match=r"model/a: flat=.* must be a range of"):
        flat_shares(NAME, torch.zeros(length), flat, (), local_shape=(12,), group=LOCAL)


def test_ranges_that_overlap_are_refused():
    parts = [
        flat_shares(NAME, torch.zeros(6), flat, (), local_shape=(2, 5), group=LOCAL)
        for flat in ((0, 6), (5, 11))
    ]
    with pytest.raises(ValueError, match="model/a: two ranges of this rank overlap"):
        joined(share for part in parts for share in part)


@ranks(2)
def test_what_cannot_be_said_is_refused():
    world = Group.of(dist.group.WORLD)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="model/a is on meta"):
        tensor_shares(NAME, torch.zeros(2, device="meta"), (), group=world)
    with pytest.raises(ValueError, match=r"must include the ranks \[0, 1\] that hold model/a"):
        tensor_shares(NAME, torch.zeros(2), (ShardSpec(0, world),), group=LOCAL)
    tensor = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"must include the ranks \[0, 1\] that hold model/a"):
        tensor_shares(NAME, tensor, (), group=LOCAL)
    partial = DTensor.from_local(torch.zeros(4), mesh, [Partial()])
    with pytest.raises(ValueError, match="must be shards and replicas"):
        tensor_shares(NAME, partial, (), group=world)
    lies = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], shape=torch.Size((4,)), stride=(1,))
    with pytest.raises(ValueError, match=r"model/a: this rank must hold \(2,\) by .* not \(3,\)"):
        tensor_shares(NAME, lies, (), group=world)
    with pytest.raises(ValueError, match="model/a must be a dense tensor, neither sparse"):
        tensor_shares(NAME, torch.eye(2).to_sparse(), (), group=world)
    complex_ones = torch.ones(4, dtype=torch.complex64)
    refused = "model/a is of torch.complex64, which must be of BOOL, U8"
    with pytest.raises(ValueError, match=refused):
        tensor_shares(NAME, complex_ones, (), group=world)
    with pytest.raises(ValueError, match=refused):
        flat_shares(NAME, complex_ones, (0, 4), (), local_shape=(4,), group=world)
    with pytest.raises(ValueError, match=refused):
        number_shares(NAME, complex_ones[0], (), local_shape=(4,))
    share = Share("a", torch.float32, (4,), [])
    assert share.view((slice(2, 2),)).shape == (0,)
