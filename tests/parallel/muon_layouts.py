"""One model of bare parameters in every layout, its gradients, and a plain Muon beside it."""

import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from megablocks_core.groups import (
    LOCAL,
    Mesh,
    Segment,
    ShardSpec,
    load_slices,
    logical_shape,
    mark,
    marks,
)

SHAPES = {
    "qkv": (16, 4),  # packed: eight rows of queries, four of keys and four of values
    "up": (10, 6),
    "down": (6, 12),
    "wide": (4, 10),  # cut along its shorter dimension
    "odd": (7, 5),
    "norm": (6,),
    "embed_tokens": (16, 8),
    "experts_up": (4, 6, 5),
    "router": (4, 6),  # not cut
}
PACKED = {"qkv": (8, 4, 4)}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MUON = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}
ADAMW = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}


class Parts(nn.Module):
    """Bare parameters with marks."""

    def __init__(self, tp=LOCAL, ep=LOCAL, etp=LOCAL, dtype=torch.float64):
        super().__init__()
        rows = tuple(Segment(size, parts=1 if size == 4 else None) for size in PACKED["qkv"])
        cuts = {
            "qkv": (ShardSpec(0, tp, rows),),
            "up": (ShardSpec(0, tp),),
            "down": (ShardSpec(1, tp),),
            "wide": (ShardSpec(0, tp),),
            "odd": (ShardSpec(0, tp, (Segment(7),)),),
            "embed_tokens": (ShardSpec(0, tp),),
            "experts_up": (ShardSpec(0, ep), ShardSpec(1, etp)),
        }
        for name, shape in SHAPES.items():
            local, specs = list(shape), cuts.get(name, ())
            for spec in specs:
                local[spec.dim] = spec.held_length(local[spec.dim])
            setattr(self, name, nn.Parameter(torch.empty(local, dtype=dtype)))
            each = "experts.{}.up.weight" if name == "experts_up" else None
            mark(self, name, *specs, each=each, expert=each is not None)
            load_slices(getattr(self, name).data, specs, tensors(0)[name])


def tensors(step):
    """Whole weights (step 0) or gradients, by name."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def set_gradients(model, step, *, without=()):
    """Each parameter's share of the whole gradients of a step."""
    for name, parameter, specs in marks(model):
        assert tuple(logical_shape(parameter, specs)) == SHAPES[name]
        parameter.grad = None
        if name not in without:
            gradient = torch.zeros_like(parameter)
            load_slices(gradient, specs, tensors(step)[name].to(parameter.dtype))
            parameter.grad = gradient


def plain_weights(
    num_steps, *, without=(), adjust=lambda rows, columns: max(1, rows / columns) ** 0.5
):
    """Whole weights after some steps, each matrix by itself."""
    weights, found = tensors(0), {}
    for name, weight in weights.items():
        gradients = [tensors(step + 1)[name] for step in range(num_steps)]
        if name in without:
            found[name] = weight
        elif name in ("norm", "embed_tokens"):
            found[name] = _adamw(weight, gradients)
        elif name == "experts_up":
            parts = [[gradient[row] for gradient in gradients] for row in range(len(weight))]
            rows = [_muon(w, g, adjust) for w, g in zip(weight, parts, strict=True)]
            found[name] = torch.stack(rows)
        else:
            sizes = PACKED.get(name, (len(weight),))
            splits = [gradient.split(sizes) for gradient in gradients]
            rows = [
                _muon(w, [split[index] for split in splits], adjust)
                for index, w in enumerate(weight.split(sizes))
            ]
            found[name] = torch.cat(rows)
    return found


def _muon(weight, gradients, adjust):
    buffer, (a, b, c) = torch.zeros_like(weight), COEFFICIENTS
    lr, momentum = MUON["lr"], MUON["momentum"]
    for gradient in gradients:
        buffer = momentum * buffer + (1 - momentum) * gradient
        x = momentum * buffer + (1 - momentum) * gradient
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = a * x + b * gram @ x + c * gram @ gram @ x
        weight = weight * (1 - lr * MUON["weight_decay"]) - lr * adjust(*weight.shape) * x
    return weight


def _adamw(weight, gradients):
    weight = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([weight], **ADAMW)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    return weight.detach()


def _fsdp(model, mesh):
    """FSDP2, columns of some and rows of others."""
    by_columns = {model.down, model.embed_tokens}
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(int(p in by_columns)))
    return model


def alone():
    """One process, or the same work on every rank."""
    return Parts(), {}


def tp():
    """Tensor parallel over all ranks."""
    return Parts(Mesh(tp=torch.distributed.get_world_size()).group("tp")), {}


def dealt():
    """Whole parameters dealt out to all ranks."""
    group = Mesh(dp=-1).group("dp")
    return Parts(), {"group": group, "expert_group": group}


def tp_dealt():
    """Tensor and expert parallel, and dealt out over the data-parallel ranks."""
    mesh = Mesh(tp=2, dp=2, ep=2)
    groups = {"group": mesh.group("dp"), "expert_group": mesh.expert.group("edp")}
    return Parts(mesh.group("tp"), mesh.expert.group("ep")), groups


def etp():
    """Experts cut by rows, too."""
    mesh = Mesh(tp=2, dp=2, ep=2, etp=2)
    return Parts(mesh.group("tp"), mesh.expert.group("ep"), mesh.expert.group("etp")), {}


def fsdp():
    """FSDP2 over all ranks."""
    size = torch.distributed.get_world_size()
    return _fsdp(Parts(), init_device_mesh("cpu", (size,))), {}


def fsdp_hybrid():
    """FSDP2 with replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _fsdp(Parts(), mesh), {}


def tp_fsdp():
    """FSDP2 inside tensor-parallel cuts, with marked experts."""
    group = Mesh(tp=2, dp=2).group("tp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    return _fsdp(Parts(group), mesh), {}


def mean_square(rows, columns):
    """The other scale of updates."""
    return 0.2 * math.sqrt(max(rows, columns))
