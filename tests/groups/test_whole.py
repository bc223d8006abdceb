"""Whole tensors are put together from slices and cut into them again, by the marks."""

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import (
    LOCAL,
    Group,
    Mesh,
    Segment,
    ShardSpec,
    gather_whole,
    load_whole,
    logical_shape,
    logical_tensors,
    mark,
    marks,
    to_dtensor,
)
from megablocks_core.testing import ranks


def _model(group):
    """Packed with a shared segment; uneven; cut along dim 1; tied; a marked and a plain buffer."""
    size, me = group.size, group.rank
    specs = {
        "packed": ShardSpec(0, group, (Segment(8), Segment(2, parts=1 if size < 4 else 2))),
        "uneven": ShardSpec(0, group, (Segment(5),)),
        "columns": ShardSpec(1, group),
    }
    whole = {
        "packed": torch.arange(30.0).view(10, 3),
        "uneven": torch.arange(10.0).view(5, 2),
        "columns": torch.arange(16.0).view(2, 8),
    }
    model = nn.Module()
    for name, spec in specs.items():
        length = whole[name].shape[spec.dim]
        held = [i for part in spec.ranges(length) for i in range(length)[part]]
        share = whole[name].index_select(spec.dim, torch.tensor(held, dtype=torch.long))
        setattr(model, name, nn.Parameter(share))
        mark(model, name, spec)
    model.child = nn.Module()
    model.child.tied = model.uneven
    model.gain = nn.Parameter(torch.ones(()))
    model.register_buffer("counts", torch.arange(size, dtype=torch.int64)[me : me + 1])
    mark(model, "counts", ShardSpec(0, group))
    model.register_buffer("table", torch.ones(2), persistent=False)
    whole |= {
        "child.tied": whole["uneven"],
        "gain": torch.ones(()),
        "counts": torch.arange(size),
    }
    return model, whole


@ranks(1, 2, 4)
def test_gather_whole_is_one_processs_state_dict():
    group = Group.of(dist.group.WORLD)
    model, whole = _model(group)
    with CommDebugMode() as traffic:
        gathered = gather_whole(model)
    assert gathered.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(gathered[name], tensor), name
    # Four cut tensors, the tied one once; each gather learns its sizes first.
    assert traffic.get_total_counts() == (0 if group.size == 1 else 8)


@ranks(1, 2, 4)
def test_load_whole_reads_only_this_ranks_slices(tmp_path):
    group = Group.of(dist.group.WORLD)
    model, whole = _model(group)
    with torch.no_grad():
        for _, parameter, _ in marks(model):
            parameter.zero_()
    path = str(tmp_path / f"whole-{group.rank}.safetensors")
    save_file({name: tensor.clone() for name, tensor in whole.items()}, path)
    with safe_open(path, "pt") as file, CommDebugMode() as traffic:
        load_whole(model, {name: file.get_slice(name) for name in file.keys()})  # noqa: SIM118
    assert traffic.get_total_counts() == 0
    for name, tensor in gather_whole(model).items():
        assert torch.equal(tensor, whole[name]), name


def test_what_is_no_module_is_refused():
    for call in (gather_whole, lambda module: load_whole(module, {})):
        with pytest.raises(ValueError, match="module='a' must be a torch.nn.Module"):
            call("a")


@ranks(2)
def test_load_whole_changes_nothing_when_it_raises():
    group = Group.of(dist.group.WORLD)
    model, whole = _model(group)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    with pytest.raises(ValueError, match=r"missing \['packed'\], not in the module \['other'\]"):
        load_whole(
            model, {n: t for n, t in zeros.items() if n != "packed"} | {"other": zeros["gain"]}
        )
    with pytest.raises(ValueError, match=r"tensors\['columns'\] of shape \(2, 9\)"):
        load_whole(model, zeros | {"columns": torch.zeros(2, 9)})
    with pytest.raises(ValueError, match=r"tensors\['uneven'\] of shape \(2, 5\) must have"):
        load_whole(model, zeros | {"uneven": zeros["uneven"].T})
    with pytest.raises(ValueError, match="'packed'. of whole numbers must have floating-point"):
        load_whole(model, zeros | {"packed": zeros["packed"].long()})
    with pytest.raises(ValueError, match="'counts'. of floating-point numbers must have whole"):
        load_whole(model, zeros | {"counts": zeros["counts"].float()})
    with pytest.raises(ValueError, match="'gain'. of complex numbers must have floating-point"):
        load_whole(model, zeros | {"gain": zeros["gain"].to(torch.complex64)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    load_whole(model, {"packed": zeros["packed"]}, strict=False)
    assert model.packed.abs().sum() == 0


@ranks(2)
def test_load_whole_takes_views_and_other_widths():
    """A transposed view of the right shape, and a narrower dtype, are read by value."""
    group = Group.of(dist.group.WORLD)
    model, whole = _model(group)
    views = {
        name: tensor.T.contiguous().T if tensor.dim() == 2 else tensor
        for name, tensor in whole.items()
    }
    views["columns"] = views["columns"].to(torch.bfloat16)
    with torch.no_grad():
        for _, parameter, _ in marks(model):
            parameter.zero_()
    load_whole(model, views)
    for name, tensor in gather_whole(model).items():
        assert torch.equal(tensor, whole[name]), name


def test_a_tied_tensor_is_listed_under_each_name_or_under_the_first():
    model, whole = _model(LOCAL)
    model.get_submodule("child").register_buffer("again", model.counts)
    every = [name for name, _, _ in logical_tensors(model)]
    once = [name for name, _, _ in logical_tensors(model, remove_duplicate=True)]
    assert set(every) == {*whole, "child.again"} and len(every) == len(set(every))
    assert once == [name for name in every if not name.startswith("child.")]


def test_buffers_of_shared_modules_and_below_wrappers_have_the_names_of_a_state_dict():
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, norm)
    assert set(gather_whole(model)) == set(model.state_dict())
    assert set(gather_whole(nn.DataParallel(model))) == set(model.state_dict())
    load_whole(model, model.state_dict())


@ranks(2)
def test_a_tied_tensor_may_come_under_either_name():
    model, whole = _model(Group.of(dist.group.WORLD))
    load_whole(model, {name: tensor * 2 for name, tensor in whole.items() if name != "uneven"})
    assert torch.equal(gather_whole(model)["uneven"], whole["uneven"] * 2)


@ranks(4)
def test_an_fsdp_cut_inside_a_tensor_parallel_one_is_gathered_and_filled():
    mesh = Mesh(tp=2, dp=2)
    tp = mesh.group("tp")
    model = nn.Module()
    whole = torch.arange(40.0).view(10, 4)
    spec = ShardSpec(0, tp, (Segment(6), Segment(4)))
    model.weight = nn.Parameter(torch.cat([whole[part] for part in spec.ranges(10)]))
    mark(model, "weight", spec)
    fully_shard(model, mesh=mesh.to_device_mesh()["dp"])
    assert torch.equal(gather_whole(model)["weight"], whole)
    ((_, parameter, specs),) = marks(model)
    assert logical_shape(parameter, specs) == (10, 4)
    load_whole(model, {"weight": whole * 2})
    assert torch.equal(gather_whole(model)["weight"], whole * 2)


@ranks(4)
def test_a_dtensor_view_shares_memory_and_says_what_it_can():
    mesh = Mesh(tp=2, dp=2)
    tp = mesh.group("tp")
    device_mesh = mesh.to_device_mesh()
    share = torch.full((2, 3), float(tp.rank))
    view = to_dtensor(share, (ShardSpec(0, tp),), device_mesh)
    assert view.shape == (4, 3)
    assert view.full_tensor()[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    share.fill_(5.0)
    assert view.full_tensor().eq(5.0).all()
    packed = ShardSpec(0, tp, (Segment(2), Segment(2)))
    with pytest.raises(ValueError, match="cannot be said by DTensor placements"):
        to_dtensor(share, (packed,), device_mesh)
    with pytest.raises(ValueError, match="is cut twice"):
        to_dtensor(share, (ShardSpec(0, tp), ShardSpec(0, mesh.group("dp"))), device_mesh)
    with pytest.raises(ValueError, match="as a dimension"):
        to_dtensor(share, (ShardSpec(0, mesh.group("tp", "dp")),), device_mesh)


def test_alone_a_module_is_its_own_whole():
    model, whole = _model(LOCAL)
    assert gather_whole(model).keys() == whole.keys()
