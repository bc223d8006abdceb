"""Parameters that travel in one message, over torch's FSDP2: the one place that knows its inside.

Torch gathers and reduces the parameters of a module in groups, of which its own call makes one for
each mesh. Here each kind of parameter (its mesh, its dtypes) gets a group of its own, and a group
reduces zeros for the parameters that this rank's tokens did not use, so that ranks which used
others still send the same messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from megablocks_core.groups import LOCAL, Group
from megablocks_core.groups.messages import start_all_to_all, wait
from megablocks_core.parallel.fsdp.parts import Kind, Part
from megablocks_core.parallel.fsdp.precision import PrecisionPolicy


class MissingMessage(RuntimeError):
    """A message did not come, because another rank did not send its part."""


@contextmanager
def naming(what: str, *groups: Group) -> Iterator[None]:
    """Say of messages over ``groups`` that fail what they were for, and what may be the cause.

    Raises:
        MissingMessage: In place of the back end's ``RuntimeError``.
    """
    try:
        yield
    except (MissingMessage, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        ranks = " and ".join(str(list(group.ranks)) for group in groups if group.size > 1)
        raise MissingMessage(
            f"{what} did not arrive over the ranks {ranks}: a rank has died, raised in forward or "
            f"backward, or not called it: {error}"
        ) from error


class Place(NamedTuple):
    """Ranks that cut parameters, and ranks that hold copies of the cuts."""

    shards: Group
    copies: Group
    mesh: FSDPMeshInfo


class ParameterGroup(FSDPParamGroup):
    """Parameters of one kind, gathered and reduced in one message each.

    Attributes:
        unit: Number of the unit it belongs to.
        kind: The kind.
        place: The ranks.
        used: Which parameters had a gradient on this rank since the last reduction.
        blank: Those whose gradient is made of zeros from this rank alone, so far.
    """

    unit: int
    kind: Kind
    place: Place
    started: Callable[[int, bool], None]

    def watch(self, unit: int, kind: Kind, place: Place) -> None:
        """Begin to take down what is used."""
        self.unit, self.kind, self.place = unit, kind, place
        self.used: set[int] = set()
        self.blank: set[int] = set()
        self._entered = False
        self._orig_dtype: torch.dtype | None = kind.own  # torch sets it in the first forward pass
        self.started = lambda unit, backward: None

    def unshard(self, async_op: bool = False) -> None:
        """Start to gather, as torch does."""
        with self._naming("parameters"):
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """Wait for what is gathered, as torch does."""
        with self._naming("parameters"):
            super().wait_for_unshard()

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather, as torch does."""
        self.started(self.unit, False)
        self._entered |= torch.is_grad_enabled()
        return super().pre_forward(module, args, kwargs)

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        """Gather again, as torch does."""
        self.started(self.unit, True)
        super().pre_backward(default_prefetch, *unused)

    def post_backward(self, *unused: Any) -> None:
        """Reduce, as torch does, with zeros for what is idle here."""
        if self.reduce_grads and self._entered:
            self._fill_idle()
        with self._naming("gradients"):
            super().post_backward(*unused)

    def finalize_backward(self) -> None:
        """Wait for what is reduced, as torch does."""
        with self._naming("gradients"):
            super().finalize_backward()

    def _naming(self, what: str) -> AbstractContextManager[None]:
        unit = f"unit {self._module_fqn!r}" if self._module_fqn else "the root unit"
        return naming(f"{what} of {unit}", self.place.shards, self.place.copies)

    def _fill_idle(self) -> None:
        # Sums over micro-batches may be wider than fresh gradients; one message has one dtype.
        widen = any(one.unsharded_accumulated_grad is not None for one in self.fsdp_params)
        for index, one in enumerate(self.fsdp_params):
            if not one.sharded_param.requires_grad or not hasattr(one, "_unsharded_param"):
                continue
            whole = one._unsharded_param
            if whole.grad is None and one.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
                if one.sharded_param.grad is None:
                    self.blank.add(index)
            else:
                self.used.add(index)
            if widen and one.unsharded_accumulated_grad is None:
                one.to_accumulated_grad_if_needed()

    def flags(self) -> list[int]:
        """For each parameter, whether this rank used it."""
        return [index in self.used for index in range(len(self.fsdp_params))]

    def end(self, used: Sequence[int]) -> None:
        """Drop the gradients of parameters that no rank used, and begin anew."""
        for index in self.blank:
            if not used[index]:
                self.fsdp_params[index].sharded_param.grad = None
        self.used, self.blank, self._entered = set(), set(), False

    def drop(self) -> None:
        """Forget gradients that were not reduced."""
        for one in self.fsdp_params:
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None
        self.end([True] * len(self.fsdp_params))

    def settle(self) -> None:
        """Free what was gathered; the next forward pass gathers it anew."""
        if self._all_gather_result is not None:
            self.wait_for_unshard()
        self._to_sharded()

    def follow_frozen(self) -> None:
        """Take over dtypes again if all parameters were frozen when they were taken."""
        if self._orig_dtype is None and any(
            one.sharded_param.requires_grad for one in self.fsdp_params
        ):
            self._init_mp_dtypes()


class _ExchangeAndSum(ReduceScatter):
    """Reduce-scatter as an exchange of slices and a sum on each rank.

    Gloo's own sends and sums the whole buffer on every rank (twice the time, measured).
    """

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        ranks = Group.of(group)
        sizes = [output_tensor.numel()] * ranks.size
        parts = wait(start_all_to_all(input_tensor, receive=sizes, send=sizes, group=ranks))
        torch.sum(parts.view(ranks.size, -1), 0, out=output_tensor)


class Settings(NamedTuple):
    """What all groups of one call share.

    Attributes:
        device: Where parameters are gathered.
        divisor: By what sums of gradients are divided.
        offload: Shards and their gradients lie in the host's memory.
        gloo: The back end knows plain sums only.
    """

    device: torch.device
    divisor: int
    offload: bool
    gloo: bool


def place_over(shards: Group, copies: Group, device_type: str) -> Place:
    """Torch's mesh over existing process groups; one small message if there are copies.

    Raises:
        ValueError: ``shards`` and ``copies`` do not cross in this rank alone, or are no grid.
    """
    # Torch remembers results of DTensors by the ranks of their mesh, with the process groups of the
    # first mesh that had them, which may have been closed since.
    _clear_sharding_prop_cache()
    if copies.size == 1:
        assert shards.pg is not None
        mesh = DeviceMesh.from_group(shards.pg, device_type)
        return Place(shards, LOCAL, FSDPMeshInfo(mesh, shard_mesh_dim=0))
    rows = copies.all_gather_object(shards.ranks)
    columns = [
        tuple(row[place] for row in rows if place < len(row)) for place in range(len(rows[0]))
    ]
    if rows[copies.rank] != shards.ranks or columns[shards.rank] != copies.ranks:
        raise ValueError(
            f"replicate={copies} must cross group={shards} in this rank alone, and have the same "
            "place in each of the groups; take both from mesh.split(...)"
        )
    assert shards.pg is not None and copies.pg is not None
    mesh = DeviceMesh.from_group(
        [copies.pg, shards.pg],
        device_type,
        mesh=torch.tensor(rows),
        mesh_dim_names=("replicate", "shard"),
    )
    return Place(shards, copies, HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0))


def make_unit(
    modules: Sequence[nn.Module],
    place: Place,
    *,
    policy: PrecisionPolicy,
    parameters: set[nn.Parameter],
    root: bool,
) -> FSDPModule:
    """Make modules a unit of FSDP2 that has no parameters yet; return the first.

    Args:
        modules: The modules.
        place: Any ranks; torch wants a mesh.
        policy: How inputs and outputs are cast.
        parameters: All of the model's.
        root: Whether the unit is the root, which torch does not free after forward.
    """
    fully_shard(
        list(modules) if len(modules) > 1 else modules[0],  # type: ignore[arg-type]
        mesh=place.mesh.mesh,
        reshard_after_forward=None if root else True,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=policy.params,
            output_dtype=policy.outputs,
            cast_forward_inputs=policy.cast_inputs,
        ),
        ignored_params=parameters,
    )
    first = modules[0]
    assert isinstance(first, FSDPModule)
    return first


def add_group(
    unit: FSDPModule,
    number: int,
    part: Part,
    place: Place,
    settings: Settings,
    *,
    reshard: bool,
) -> ParameterGroup:
    """Cut parameters, which become DTensors, and let ``unit`` gather and reduce them."""
    state: Any = unit._get_fsdp_state()
    owned, kind = part.parameters(), part.kind
    for parameter in owned:
        if not parameter.is_meta and parameter.device != settings.device:
            parameter.data = parameter.data.to(settings.device)
    offload = CPUOffloadPolicy(pin_memory=settings.device.type != "cpu")
    group = ParameterGroup(
        owned,
        state._modules,
        place.mesh,
        place.mesh if reshard else None,
        settings.device,
        None,
        MixedPrecisionPolicy(
            param_dtype=None if kind.used == kind.own else kind.used,
            reduce_dtype=None if kind.reduced == kind.used else kind.reduced,
        ),
        offload if settings.offload else OffloadPolicy(),
    )
    group.watch(number, kind, place)
    group.gradient_divide_factor = float(settings.divisor)
    group.force_sum_reduction_for_comms = settings.gloo or settings.divisor == 1
    if settings.gloo and settings.device.type == "cpu":
        group._reduce_scatter_comm = _ExchangeAndSum()
        # Without streams a gather is beside the computation only if it is waited for later.
        group.unshard_async_op = True
    state._fsdp_param_groups.append(group)
    return group


@contextmanager
def gradients_stay(module: nn.Module) -> Iterator[None]:
    """Backward passes inside reduce no gradients; afterwards what did before does again."""
    groups = [
        group
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for group in part._get_fsdp_state()._fsdp_param_groups
    ]
    before = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
    for group in groups:
        group.reduce_grads = group.all_reduce_grads = False
    try:
        yield
    finally:
        for group, reduces, sums_copies in before:
            group.reduce_grads, group.all_reduce_grads = reduces, sums_copies


def backward_broke_off(root: FSDPModule) -> bool:
    """Whether the last backward pass began and never ended."""
    return root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def forward_broke_off(root: FSDPModule) -> bool:
    """Whether the last forward pass began and never ended."""
    return root._get_fsdp_state()._state_ctx.iter_forward_root is not None
