"""What all wrappers that reduce gradients refuse: a second one, and experts that none reduces."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import nn

from megablocks_core.groups import LOCAL, Group, Specs

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FSDPModule")


def refuse_wrapped(module: nn.Module) -> None:
    """Raise if something in the module reduces gradients already.

    Raises:
        ValueError: It does, or is no module; the text names the wrapper and where it stands.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module={module!r} must be a module")
    for name, part in module.named_modules():
        kinds = {kind.__name__ for kind in type(part).__mro__}
        for kind in _WRAPPERS:
            if kind in kinds:
                raise ValueError(
                    f"module must not be wrapped twice: {name or 'it'} is a {kind} already"
                )


def check_experts(
    named: Iterable[tuple[str, nn.Parameter, Specs]],
    *,
    group: Group,
    expert_group: Group,
    replicate: Group = LOCAL,
) -> None:
    """Raise if ranks that see different tokens hold copies of an expert that are never summed.

    The groups that cut an expert, and ``expert_group``, reach as many ranks as the product of
    their sizes. All ranks known to this one that see tokens must be among them. An expert that
    no mark cuts may be another one on each rank: there a given ``expert_group`` is trusted.

    Args:
        named: (name, parameter, specs) as ``marks`` gives them.
        group: The ranks that see different tokens.
        expert_group: Those over which experts are summed.
        replicate: More ranks that see different tokens.

    Raises:
        ValueError: They are not; it names the first such expert.
    """
    if group.size == replicate.size == 1:
        return
    for name, _, specs in named:
        if not specs.expert:
            continue
        cuts = {spec.group.ranks for spec in specs if spec.group.size > 1}
        if not cuts and expert_group.size > 1:
            continue
        over = cuts | ({expert_group.ranks} if expert_group.size > 1 else set())
        seen = [one.ranks for one in (group, replicate) if one.size > 1]
        if len(set().union(*over, *seen)) > prod(map(len, over)):
            raise ValueError(
                f"expert_group={expert_group} must be the ranks that share parameter {name!r}: "
                f"marks cut the expert over {sorted(cuts)}, and other ranks "
                f"of group={group} hold copies that would never be summed"
            )
