"""Fully sharded data parallelism (ZeRO-3) over torch's FSDP2, by shard marks.

Every rank keeps a slice of each parameter, gradient and optimizer state. A unit's parameters are
gathered before it runs and freed afterwards; its gradients are reduced to slices. Torch's
``fully_shard`` does the work (https://arxiv.org/abs/2304.11277); this part tells it which modules
are units, over which ranks each parameter is cut, and by what its gradient is divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from megablocks_core.groups import LOCAL, Group, check_group, marks, together
from megablocks_core.parallel.checks import (
    REDUCTIONS,
    check_choice,
    check_flags,
    check_module,
    check_words,
)
from megablocks_core.parallel.fsdp.parts import (
    Part,
    check_reshard,
    parameter_at,
    plan_parts,
    plan_reshards,
    refuse,
)
from megablocks_core.parallel.fsdp.precision import (
    AS_THEY_ARE,
    PrecisionPolicy,
    use_in,
    widen_kept,
)
from megablocks_core.parallel.fsdp.units import Unit, plan_units
from megablocks_core.parallel.wrapping.agreement import words_of
from megablocks_core.parallel.wrapping.claims import refuse_claimed
from megablocks_core.parallel.wrapping.refusals import check_experts, refuse_wrapped
from megablocks_core.parallel.wrapping.replicas import check_replicas


def fully_shard(
    module: nn.Module,
    *,
    group: Group,
    expert_group: Group = LOCAL,
    replicate: Group = LOCAL,
    reduction: str = "mean",
    units: str | Sequence[str] | None = None,
    reshard: bool | Mapping[str, bool] = True,
    precision: PrecisionPolicy | None = None,
    prefetch: bool = True,
    offload: bool = False,
) -> nn.Module:
    """Cut the parameters of ``module`` over ``group``, in place, and return it.

    Parameters become DTensors, cut along dim 0 inside what marks cut; names stay. Make the
    optimizer afterwards. With one rank in every group the module is left as it is. Every rank runs
    each unit, forward and backward, in the same order; inside a unit ranks may use different
    parameters. One that any rank used has a gradient on all ranks; one that none used has none.

    Sends, for N ranks and P bytes of a unit's parameters as they are used: a gather of P (N-1)/N
    in forward and again in backward (once in all for the root and for what is not resharded), a
    reduction of as many elements of gradients in backward, and one byte a parameter at its end.

    Args:
        module: The same on every rank but for what its marks cut. It may be on ``meta``; then call
            ``to_empty`` and ``reset_parameters`` afterwards.
        group: Ranks that share dense parameters and saw different tokens.
        expert_group: Ranks that share the parameters marked as experts. Over one rank they stay
            whole.
        replicate: Ranks that hold copies of the cuts (hybrid sharding); those of experts are cut
            over all of ``expert_group``.
        reduction: "mean" divides gradients, those of experts too, by the number of ranks that
            share dense parameters, ``group.size * replicate.size``; "sum" does not.
        units: Patterns of names of the modules that are gathered one at a time. Default: the
            elements of the outermost ``ModuleList`` and ``ModuleDict``. What lies in none belongs
            to the root; modules that share a parameter become one unit.
        reshard: Whether units are freed between forward and backward, for all or by patterns of
            their names (others are). The root is not.
        precision: Dtypes to compute and reduce in. Default: a parameter's own, and float32
            for the gradients of 16-bit parameters.
        prefetch: Gather the next unit early, in the order of the first step.
        offload: Keep slices, gradients and so the optimizer's state in the host's memory.

    Raises:
        ValueError: An argument breaks its rule; a parameter cannot be served (a scalar, a DTensor,
            an empty, complex or non-contiguous one); copies of an expert lie outside of
            ``expert_group``; the module is wrapped already; ranks differ in
            names, shapes, dtypes, values or options.
    """
    groups = {"group": group, "expert_group": expert_group, "replicate": replicate}
    for name, ranks in groups.items():
        check_group(ranks, name)
    check_module(module)
    check_choice("reduction", reduction, REDUCTIONS)
    if units is not None and not isinstance(units, str):
        check_words("units", units)
    check_reshard(reshard)
    if precision is not None and not isinstance(precision, PrecisionPolicy):
        raise ValueError(f"precision={precision!r} must be a PrecisionPolicy")
    check_flags(prefetch=prefetch, offload=offload)
    if group.size == 1 and replicate.size > 1:
        raise ValueError(
            f"replicate={replicate} needs a group of more than one rank to cut over; copies alone "
            "are DataParallel"
        )
    if group.size == expert_group.size == 1:
        return module
    policy = precision or AS_THEY_ARE
    in_shard = together("fully_shard", group=group if group.size > 1 else expert_group)
    with together("fully_shard", group=replicate), in_shard:
        refuse_wrapped(module)
        refuse(module)
        check_experts(marks(module), **groups)
        plan = plan_units(module, [units] if isinstance(units, str) else units)
        freed = plan_reshards(plan, reshard)
        parts = plan_parts(module, plan, policy, widen_kept(module, policy))
        if offload and expert_group.size == 1 and any(p.kind.expert for own in parts for p in own):
            raise ValueError(
                "offload=True: experts lie whole on each rank over expert_group=LOCAL and would "
                "stay on their device"
            )
        named = list(marks(module))
        refuse_claimed(named)
    agreed = words_of(
        reduction=reduction,
        units=units,
        reshard=reshard,
        precision=policy,
        prefetch=prefetch,
        offload=offload,
    )
    check_replicas(named, group=group, expert_group=expert_group, agreed=agreed)
    check_replicas(named, group=replicate, expert_group=LOCAL, agreed=agreed)
    divisor = group.size * replicate.size if reduction == "mean" else 1
    work = _Work(module, plan, parts, freed, policy, divisor)
    work.wrap(**groups, prefetch=prefetch, offload=offload)
    return module


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backward passes inside accumulate gradients on each rank and send none.

    The first backward pass after it reduces the sum, in which 16-bit gradients are added in
    float32. It may stand inside another one, and ``module`` be one that ``fully_shard`` left as it
    is, or has such modules in it.

    Raises:
        ValueError: ``module`` is none.
    """
    check_module(module)
    if not any(hasattr(part, "set_requires_gradient_sync") for part in module.modules()):
        yield  # torch's FSDP2 is not loaded
        return
    from megablocks_core.parallel.fsdp.groups import gradients_stay

    with gradients_stay(module):
        yield


class _Work(NamedTuple):
    """What was planned.

    Attributes:
        module: The root.
        units: Its units.
        parts: The parameters of each, by kind.
        freed: Whether each is freed after forward.
        policy: The dtypes.
        divisor: By what gradients are divided.
    """

    module: nn.Module
    units: list[Unit]
    parts: list[list[Part]]
    freed: list[bool]
    policy: PrecisionPolicy
    divisor: int

    def wrap(
        self,
        *,
        group: Group,
        expert_group: Group,
        replicate: Group,
        prefetch: bool,
        offload: bool,
    ) -> None:
        """Make every unit and its groups, and the hooks of the root."""
        import torch.distributed as dist

        from megablocks_core.parallel.fsdp.groups import Settings, add_group, make_unit, place_over
        from megablocks_core.parallel.fsdp.steps import Steps

        gloo = "nccl" not in dist.get_backend_config((group.size > 1 and group or expert_group).pg)
        settings = Settings(_device(self.module, gloo=gloo), self.divisor, offload, gloo)
        places = {
            expert: place_over(shards, copies, settings.device.type)
            for expert, shards, copies in ((False, group, replicate), (True, expert_group, LOCAL))
            if shards.size > 1
        }
        everything = {parameter for _, parameter, _ in marks(self.module)}
        made, groups = [], []
        for number, (unit, parts, freed) in enumerate(
            zip(self.units, self.parts, self.freed, strict=True)
        ):
            root = number == len(self.units) - 1
            made.append(
                make_unit(
                    unit.modules,
                    next(iter(places.values())),
                    policy=self.policy if root else AS_THEY_ARE,
                    parameters=everything,
                    root=root,
                )
            )
            for part in parts:
                if part.kind.expert in places:
                    place = places[part.kind.expert]
                    groups.append(add_group(made[-1], number, part, place, settings, reshard=freed))
        alone = [part for parts in self.parts for part in parts if part.kind.expert not in places]
        for part in alone:
            for owner, name in part.places:
                if part.kind.used != parameter_at((owner, name)).dtype:
                    use_in(owner, name, part.kind.used)
        where = [place for part in alone for place in part.places]
        Steps(made[-1], made, groups, alone=where, divisor=self.divisor, prefetch=prefetch)


def _device(module: nn.Module, *, gloo: bool) -> torch.device:
    """Where the parameters are gathered: where they are, or the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {parameter.device.type for parameter in module.parameters()} - {"meta"}
    if len(kinds) > 1:
        raise ValueError(f"module has parameters on {sorted(kinds)}; they must be on one device")
    if accelerator is None or (gloo and kinds != {accelerator.type}):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
