"""The same work in comparable libraries: torch's ``parallelize_module``, transformers' own plan."""

from typing import Any

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megablocks_core.groups import Group, marks, whole_tensor

TORCH = "torch parallelize_module"
TRANSFORMERS = 'transformers tp_plan="auto"'


def torch_mlp(whole: nn.Sequential, *, group: Group) -> nn.Module:
    """A two-layer MLP cut by torch, in place."""
    mesh = init_device_mesh("cpu", (group.size,))
    return parallelize_module(whole, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def transformers_model(whole: Any, *, group: Group) -> nn.Module:
    """A model cut by transformers with the model's own plan, in place."""
    from transformers.distributed.configuration_utils import DistributedConfig

    plan = DistributedConfig(tp_size=group.size, tp_plan="auto")
    # What ``from_pretrained`` does with a ``distributed_config``; that needs accelerate.
    plan, _, mesh = whole.prepare_distribute_model(plan)
    return whole.maybe_distribute_model(whole, plan, mesh)


def arrived(tensor: Tensor) -> Tensor:
    """A tensor of torch's DTensor, which may still be under way, once it is there."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def assert_equal_gradients(ours: nn.Module, peer: nn.Module) -> None:
    """Every gradient, put together from the ranks, is the other's but for rounding."""
    parameters = dict(peer.named_parameters())
    for name, parameter, specs in marks(ours):
        theirs = parameters[name].grad
        assert parameter.grad is not None and theirs is not None
        if isinstance(theirs, DTensor):
            theirs = theirs.full_tensor()
        assert_close_by_norm(whole_tensor(parameter.grad, specs), theirs)


def assert_close_by_norm(ours: Tensor, theirs: Tensor) -> None:
    """Equal but for the rounding of float32."""
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
