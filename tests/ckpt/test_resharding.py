"""State saved at any layout resumes at any other: tensors, optimizer state, and the next step."""

import warnings
import zlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megablocks_core import ckpt
from megablocks_core.ckpt.state.entries import take_apart
from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    ShardSpec,
    load_slices,
    logical_shape,
    mark,
    marks,
    own_slices,
)
from megablocks_core.groups.placements import placement_specs
from megablocks_core.testing import ranks
from tests.ckpt.flat_optimizer import FlatAdam
from tests.groups.strided import strided_layer

LAYERS, EXPERTS = 4, 4


class Layout(NamedTuple):
    """Sizes of the axes of the first ``ranks`` ranks, in the order pp, dp, tp."""

    ranks: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    fsdp: bool = False

    @property
    def dp(self):
        return self.ranks // (self.tp * self.pp)


class Groups:
    """The groups of one layout; every rank of the world makes them."""

    def __init__(self, layout):
        numbers = torch.arange(layout.ranks)
        dense = numbers.view(layout.pp, layout.dp, layout.tp)
        experts = numbers.view(layout.pp, -1, layout.ep, layout.etp)
        self.stage = dist.get_rank() // (layout.ranks // layout.pp)
        self.all = _group_of(numbers[None])
        self.tp, self.dp = _group_of(dense), _group_of(dense.transpose(1, 2))
        self.etp, self.ep = _group_of(experts), _group_of(experts.transpose(2, 3))
        self.edp = _group_of(experts.movedim(1, -1))
        self.is_member = dist.get_rank() < layout.ranks
        if layout.fsdp:
            self.mesh = DeviceMesh("cpu", dense[0], mesh_dim_names=("dp", "tp"))["dp"]


def _group_of(numbers):
    """This rank's group among the rows of the last dimension."""
    mine = LOCAL
    for row in numbers.reshape(-1, numbers.shape[-1]).tolist():
        if len(row) > 1:
            pg = dist.new_group(row)
            if dist.get_rank() in row:
                mine = Group.of(pg)
    return mine


class Layer(nn.Module):
    """Cut by rows, by columns, packed with copies, replicated."""

    def __init__(self, groups):
        super().__init__()
        size, copies = groups.tp.size, min(groups.tp.size, 2)
        self.rows = nn.Parameter(torch.zeros(8 // size, 6))
        self.columns = nn.Parameter(torch.zeros(6, 8 // size, dtype=torch.bfloat16))
        self.packed = nn.Parameter(torch.zeros(8 // size + 4 // copies, 3))
        self.norm = nn.Parameter(torch.zeros(7))
        mark(self, "rows", ShardSpec(0, groups.tp))
        mark(self, "columns", ShardSpec(1, groups.tp))
        segments = (Segment(8), Segment(4, parts=copies))
        mark(self, "packed", ShardSpec(0, groups.tp, segments=segments))
        self.experts = Experts(groups)


class Experts(nn.Module):
    """A stack of experts, cut over ep, and inside over etp."""

    def __init__(self, groups):
        super().__init__()
        ep, etp = groups.ep, groups.etp
        self.up = nn.Parameter(torch.zeros(EXPERTS // ep.size, 6 // etp.size, 5))
        cuts = (ShardSpec(0, ep), ShardSpec(1, etp))
        mark(self, "up", *cuts, each="experts.{}.up.weight", expert=True)


class Net(nn.Module):
    """The layers of one pipeline stage, under the names they have in the whole model."""

    def __init__(self, layout, groups):
        super().__init__()
        count = LAYERS // layout.pp
        mine = range(groups.stage * count, (groups.stage + 1) * count)
        self.layers = nn.ModuleDict({str(number): Layer(groups) for number in mine})
        if groups.stage == layout.pp - 1:
            self.register_buffer("seen", torch.tensor(0))


def _build(layout, groups, *, steps, optimizer="adam"):
    net: Any = Net(layout, groups)
    _fill(net, lambda parameter: parameter, seed=0)
    if layout.fsdp:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fully_shard(net, mesh=groups.mesh)
    parameters = [parameter for _, parameter, _ in marks(net)]
    if optimizer == "adam":
        decayed = [one for one in parameters if one.dim() > 1]
        state = {
            "adam": torch.optim.AdamW(
                [
                    {"params": decayed, "weight_decay": 0.1},
                    {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
                ]
            )
        }
    else:
        dense = [one for _, one, specs in marks(net) if not specs.expert]
        experts = [one for _, one, specs in marks(net) if specs.expert]
        state = {
            "adam": FlatAdam([dense[::2], dense[1::2]], group=groups.dp),
            "experts": FlatAdam([experts], group=groups.edp),
        }
    state["model"] = net
    for step in range(steps):
        _step(state, step)
    return state


def _step(state, step):
    """One step whose whole gradients are the same at every layout."""
    net = state["model"]
    for _, parameter, _ in marks(net):
        parameter.grad = torch.zeros_like(parameter)
    _fill(net, lambda parameter: parameter.grad, seed=step + 1)
    for name in ("adam", "experts"):
        if name in state:
            state[name].step()
    if hasattr(net, "seen"):
        net.seen += 1


def _fill(net, pick, seed):
    for name, parameter, specs in marks(net):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        whole = torch.randn(logical_shape(parameter, specs), generator=generator)
        load_slices(pick(parameter), specs, whole)


def _wholes(steps, optimizer):
    """All tensors of one process, by name."""
    alone = Groups.__new__(Groups)
    alone.stage, alone.tp, alone.dp, alone.etp, alone.ep, alone.edp = 0, *[LOCAL] * 5
    state = _build(Layout(), alone, steps=steps, optimizer=optimizer)
    return {share.name: share.view(_all(share)) for share in take_apart(state, group=LOCAL).shares}


def _all(share):
    return tuple(slice(0, length) for length in share.shape)


def _assert_same(state, wholes, group):
    found = take_apart(state, group=group).shares
    for share in found:
        for box, view in share.pieces:
            assert torch.equal(view, wholes[share.name][box]), share.name
    names = group.all_gather_object([share.name for share in found])
    assert {name for mine in names for name in mine} == set(wholes)


def _matrix(root, layouts, targets, optimizer="adam"):
    """Save under each layout, load under each target, and take a step."""
    groups = {layout: Groups(layout) for layout in dict.fromkeys([*layouts, *targets])}
    before, after = _wholes(3, optimizer), _wholes(4, optimizer)
    for number, layout in enumerate(layouts):
        if groups[layout].is_member:
            state = _build(layout, groups[layout], steps=3, optimizer=optimizer)
            ckpt.save(root / str(number) / "c", state | {"step": 3}, group=groups[layout].all)
        dist.barrier()
        for target in targets:
            if groups[target].is_member:
                state = _build(target, groups[target], steps=1, optimizer=optimizer)
                state["step"] = 0
                group = groups[target].all
                assert ckpt.load(root / str(number) / "c", state, group=group) == ([], [])
                assert state.pop("step") == 3
                _assert_same(state, before, group)
                _step(state, 3)
                _assert_same(state, after, group)
        dist.barrier()


@ranks(4)
def test_f165_every_layout_to_every_other(tmp_path):
    layouts = [
        Layout(1),
        Layout(4, tp=4, ep=2, etp=2),
        Layout(4, pp=2, ep=2),
        Layout(4, tp=2, fsdp=True),
    ]
    _matrix(tmp_path, layouts, layouts)


@pytest.mark.slow
@ranks(8, timeout=600)
def test_f165_every_layout_of_eight_ranks_to_every_other(tmp_path):
    layouts = [
        Layout(1),
        Layout(2, tp=2),
        Layout(3, fsdp=True),
        Layout(4, pp=4, ep=1),
        Layout(8, tp=2, pp=2, ep=2),
        Layout(8, tp=4, ep=4, etp=2),
        Layout(8, tp=2, ep=4),
        Layout(8, tp=2, fsdp=True),
        Layout(8, tp=8, ep=2, etp=2),
    ]
    _matrix(tmp_path, layouts, layouts)


@ranks(4)
def test_f156_flat_state_of_several_buckets_resumes_at_other_layouts(tmp_path):
    layouts = [Layout(4), Layout(2, tp=2), Layout(4, tp=2, ep=2)]
    _matrix(tmp_path, layouts[:1] + layouts[2:], [*layouts, Layout(1)], optimizer="flat")


@pytest.mark.slow
@ranks(8, timeout=600)
def test_f156_flat_state_of_eight_ranks_resumes_at_other_layouts(tmp_path):
    layouts = [
        Layout(8),
        Layout(8, tp=2, pp=2, ep=2),
        Layout(6, pp=2),
        Layout(8, tp=4, ep=2, etp=2),
        Layout(1),
    ]
    _matrix(tmp_path, layouts, layouts, optimizer="flat")


@ranks(4)
def test_f156_two_buckets_of_nine_and_five_elements(tmp_path):
    """dp 4 pads them to 12 and 8; what comes back at dp 2 and 1 are all 14 values."""
    world = Group.of(dist.group.WORLD)
    pair = _group_of(torch.tensor([[0, 1]]))
    lengths = (4, 5, 2, 3)

    def build(group):
        net = nn.ParameterList([nn.Parameter(torch.zeros(length)) for length in lengths])
        return net, FlatAdam([list(net[:2]), list(net[2:])], group=group)

    net, adam = build(world)
    for bucket, state in enumerate(adam.state):
        length = len(state["exp_avg"])
        assert length * 4 == (12, 8)[bucket]
        moments = torch.full((4 * length,), -1.0)
        numel = (9, 5)[bucket]
        moments[:numel] = torch.arange(numel) + 9.0 * bucket
        state["exp_avg"].copy_(moments[length * world.rank :][:length])
    ckpt.save(tmp_path / "c", {"model": net, "adam": adam}, group=world)
    for group in (pair, LOCAL) if world.rank < 2 else (LOCAL,):
        net, adam = build(group)
        for state in adam.state:
            state["exp_avg"].fill_(-2)
        ckpt.load(tmp_path / "c", {"model": net, "adam": adam}, group=group)
        for bucket, state in enumerate(adam.state):
            whole = torch.cat(group.all_gather(state["exp_avg"]))
            numel = (9, 5)[bucket]
            assert torch.equal(whole[:numel], torch.arange(numel) + 9.0 * bucket)
            assert (whole[numel:] == -2).all()  # padding is as it was


@ranks(4)
@pytest.mark.parametrize("rows", [8, 6, 7, 5, 3, 13])
def test_fsdp_over_torchs_tensor_parallelism_resumes_unevenly_cut(tmp_path, rows):
    """Strided shards of torch, moments too: in one process, and at the same layout."""
    world = Group.of(dist.group.WORLD)
    whole, moments = _numbered("weight", (rows, 5)), _numbered("moments", (rows, 5))
    state = _strided_state(rows, whole, moments)
    ckpt.save(tmp_path / "a", state, group=world)

    again = _strided_state(rows, torch.zeros(rows, 5), torch.zeros(rows, 5))
    ckpt.load(tmp_path / "a", again, group=world)
    for one in (state, again):
        weight = one["model"].weight
        assert torch.equal(weight.full_tensor(), whole)
        for field in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(one["optimizer"].state[weight][field].full_tensor(), moments)

    alone = nn.Linear(5, rows, bias=False)
    optimizer = torch.optim.AdamW(alone.parameters())
    ckpt.load(tmp_path / "a", {"model": alone, "optimizer": optimizer})
    assert torch.equal(alone.weight, whole)
    for field in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[alone.weight][field], moments)


def _strided_state(rows, whole, moments):
    """A layer cut by torch's tensor parallelism and FSDP, and an AdamW with given moments."""
    layer = strided_layer(whole)
    optimizer, weight = torch.optim.AdamW(layer.parameters(), lr=0.0), layer.weight
    assert isinstance(weight, DTensor) and "_Strided" in repr(weight.placements)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for field in ("exp_avg", "exp_avg_sq"):
        kept = optimizer.state[weight][field].to_local()
        for theirs, ours in own_slices(placement_specs(weight), (rows, 5)):
            kept[ours] = moments[theirs]
    return {"model": layer, "optimizer": optimizer}


def _numbered(name, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)
