"""One gradient in every layout that a model's parameters can have, on four ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from megablocks_core.groups import (
    GradientShard,
    Mesh,
    Segment,
    ShardSpec,
    chunk_slice,
    load_slices,
    mark,
    marks,
    own_slices,
    set_gradient_shard,
)
from megablocks_core.groups.shares import gradient_part

# Whole gradients of four parameters; the last is a stack of four experts.
SHAPES = {"a": (10, 6), "b": (12, 3), "c": (5,), "e": (4, 2, 3)}


def whole_gradients(seed=3):
    """Random values, one in four of them zero."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        found[name] = values * (torch.rand(shape, generator=generator) > 0.25)
    return found


class Cut(nn.Module):
    """Parameters of given cuts, with their shares of the whole gradients."""

    def __init__(self, specs, wholes):
        super().__init__()
        for name, whole in wholes.items():
            cuts = specs.get(name, ())
            share = torch.empty(_local_shape(whole.shape, cuts), dtype=whole.dtype)
            load_slices(share, cuts, whole)
            setattr(self, name, nn.Parameter(torch.zeros_like(share)))
            mark(self, name, *cuts, expert=name == "e")
            getattr(self, name).grad = share


def _local_shape(shape, specs):
    boxes = own_slices(specs, tuple(shape))
    return [max((mine[dim].stop for _, mine in boxes), default=0) for dim in range(len(shape))]


def _cuts(mesh):
    tp, ep = mesh.group("tp"), mesh.expert.group("ep")
    return {
        "a": (ShardSpec(0, tp, (Segment(6), Segment(4, parts=1))),),  # four rows on both
        "b": (ShardSpec(1, tp, (Segment(3),)),),  # two columns and one
        "e": (ShardSpec(0, ep),),
    }


def _shard_gradients(model, group, expert_group, *, first=0):
    """Leave each rank a range of each flattened gradient; the last may have nothing."""
    for index, (_, parameter, specs) in enumerate(marks(model)):
        among = expert_group if specs.expert else group
        if index < first:
            continue
        flat = parameter.grad.reshape(-1)
        parameter.grad = None
        # Cut as a flat buffer is: at any element, and not alike for all parameters.
        edges = [chunk_slice(len(flat) + index, among.size, rank) for rank in range(among.size)]
        part = slice(
            *(min(edge, len(flat)) for edge in (edges[among.rank].start, edges[among.rank].stop))
        )
        set_gradient_shard(parameter, GradientShard(flat[part].clone(), part.start, among))


def whole(wholes):
    """Every rank holds all."""
    return Cut({}, wholes)


def marked(wholes):
    """Tensor and expert parallel, with slices that neighbours hold too."""
    return Cut(_cuts(Mesh(tp=2, dp=2, ep=2)), wholes)


def zero(wholes):
    """The same, of which a sharded optimizer leaves each data-parallel rank a range."""
    mesh = Mesh(tp=2, dp=2, ep=2)
    model = Cut(_cuts(mesh), wholes)
    _shard_gradients(model, mesh.group("dp"), mesh.expert.group("edp"))
    return model


def zero_of_four(wholes):
    """Ranges over four ranks, some of them empty."""
    mesh = Mesh(dp=4)
    model = Cut({}, wholes)
    _shard_gradients(model, mesh.group("dp"), mesh.expert.group("edp"))
    return model


def hybrid(wholes):
    """Ranges over two ranks, each held twice."""
    mesh = Mesh(dp=4)
    shard, _ = mesh.split("dp", inner=2)
    model = Cut({}, wholes)
    _shard_gradients(model, shard, shard)
    return model


def some_ranges(wholes):
    """Some gradients whole and some in ranges."""
    mesh = Mesh(tp=2, dp=2, ep=2)
    model = Cut(_cuts(mesh), wholes)
    _shard_gradients(model, mesh.group("dp"), mesh.expert.group("edp"), first=2)
    return model


def _fsdp(model, mesh, columns=()):
    """Cut by torch's FSDP2, with gradients cut alike."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    by_columns = {getattr(model, name) for name in columns}
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(int(p in by_columns)))
    for name, parameter in model.named_parameters():
        parameter.grad = distribute_tensor(
            gradients[name], parameter.device_mesh, parameter.placements
        )
    return model


def fsdp(wholes):
    """FSDP2 over four ranks, of which some hold nothing."""
    Mesh(dp=4)
    return _fsdp(Cut({}, wholes), init_device_mesh("cpu", (4,)))


def fsdp_hybrid(wholes):
    """FSDP2 with replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _fsdp(Cut({}, wholes), mesh)


def fsdp_in_marks(wholes):
    """FSDP2 inside tensor-parallel cuts of the same dimension."""
    cuts = _cuts(Mesh(tp=2, dp=2, ep=2))
    cuts["e"] = ()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    return _fsdp(Cut(cuts, wholes), mesh)


def fsdp_of_columns(wholes):
    """FSDP2 that cuts dimension 1 inside tensor-parallel cuts."""
    cuts = _cuts(Mesh(tp=2, dp=2, ep=2))
    cuts["e"] = ()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    return _fsdp(Cut(cuts, wholes), mesh, columns=("a", "e"))


def mixed_meshes(wholes):
    """DTensors of two meshes, a marked parameter, a plain one and a range beside each other."""
    mesh = Mesh(tp=2, dp=2, ep=2)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    four = init_device_mesh("cpu", (4,))
    model = Cut({"e": _cuts(mesh)["e"]}, wholes)
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    _distribute(model, "a", four, [Shard(0)])
    _distribute(model, "b", both, strided)
    _shard_gradients(model, mesh.group("dp"), mesh.expert.group("edp"), first=3)
    return model


def _distribute(model, name, mesh, placements):
    parameter = getattr(model, name)
    spread = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
    spread.grad = distribute_tensor(parameter.grad, mesh, placements)
    setattr(model, name, spread)


def unsummed(wholes):
    """A DTensor's gradient that is still to be summed."""
    model, mesh = Cut({}, wholes), init_device_mesh("cpu", (4,))
    gradient = wholes["a"]
    _distribute(model, "a", mesh, [Replicate()])
    model.a.grad = DTensor.from_local(gradient / 4, mesh, [Partial()])
    return model


LAYOUTS = [
    whole,
    marked,
    zero,
    zero_of_four,
    hybrid,
    some_ranges,
    fsdp,
    fsdp_hybrid,
    fsdp_in_marks,
    fsdp_of_columns,
    mixed_meshes,
    unsummed,
]


def held_gradients(model):
    """The memory of every gradient on this rank, by name."""
    return {name: gradient_part(parameter, specs).held for name, parameter, specs in marks(model)}
