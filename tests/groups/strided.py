"""A layer that torch cuts twice along one dimension: by tensor parallelism, then by FSDP2."""

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def strided_layer(whole: Tensor) -> nn.Linear:
    """A linear layer with this weight on four ranks, whose shards are strided."""
    rows, columns = whole.shape
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(columns, rows, bias=False)
    with torch.no_grad():
        layer.weight.copy_(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        fully_shard(layer, mesh=mesh["dp"])
    return layer
