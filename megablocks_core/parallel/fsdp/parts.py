"""Which parameters of a unit travel in one message: those of one kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megablocks_core.groups import marks
from megablocks_core.groups.patterns import matcher
from megablocks_core.parallel.fsdp.precision import PrecisionPolicy, dtypes_of
from megablocks_core.parallel.fsdp.units import Unit, logical_path

# Below this share of its unit, parameters of another dtype travel with the root's: one message
# for all of them in place of one for each unit.
_FEW = 0.05


class Kind(NamedTuple):
    """What the parameters of a message have in common.

    Attributes:
        expert: Whether they lie on the expert group.
        own: Their dtype.
        used: The dtype in which they are gathered.
        reduced: The dtype in which their gradients are summed.
    """

    expert: bool
    own: torch.dtype
    used: torch.dtype
    reduced: torch.dtype


@dataclass(frozen=True)
class Part:
    """Parameters of one kind that one unit gathers, as (owner, name there)."""

    kind: Kind
    places: list[tuple[nn.Module, str]]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, as they are now."""
        return [parameter_at(place) for place in self.places]


def parameter_at(place: tuple[nn.Module, str]) -> nn.Parameter:
    """The parameter that an owner has under a name."""
    parameter = place[0]._parameters[place[1]]
    assert parameter is not None
    return parameter


def plan_parts(
    module: nn.Module, units: Sequence[Unit], policy: PrecisionPolicy, kept: set[int]
) -> list[list[Part]]:
    """The parts of each unit.

    Experts stay in their unit. So do dense parameters, but for kinds with a small share of a unit,
    which the root gathers for all units.

    Args:
        module: The root.
        units: The root's is the last.
        policy: The dtypes.
        kept: Ids of the parameters that the policy leaves as they are.
    """
    experts = {id(one) for _, one, specs in marks(module) if specs.expert}
    few: dict[Kind, Part] = {}
    found = []
    for unit in units:
        parts: dict[Kind, Part] = {}
        for place in unit.parameters:
            parameter = parameter_at(place)
            used, reduced = dtypes_of(parameter, policy, kept=id(parameter) in kept)
            kind = Kind(id(parameter) in experts, parameter.dtype, used, reduced)
            parts.setdefault(kind, Part(kind, [])).places.append(place)
        sizes = {kind: sum(one.numel() for one in parts[kind].parameters()) for kind in parts}
        dense = [kind for kind in parts if not kind.expert]
        main = max(dense, key=lambda kind: sizes[kind], default=None)
        for kind in dense:
            if kind != main and sizes[kind] < _FEW * sum(sizes.values()):
                few.setdefault(kind, Part(kind, [])).places.extend(parts.pop(kind).places)
        found.append(list(parts.values()))
    root = {part.kind: part for part in found.pop()}
    for kind, part in few.items():
        root.setdefault(kind, Part(kind, [])).places.extend(part.places)
    return [*found, list(root.values())]


def plan_reshards(units: Sequence[Unit], reshard: bool | Mapping[str, bool]) -> list[bool]:
    """For each unit, whether it is freed after forward.

    Raises:
        ValueError: ``reshard`` is neither a bool nor patterns with one each, or a pattern matches
            no unit.
    """
    check_reshard(reshard)
    policies = {"**": reshard} if isinstance(reshard, bool) else reshard
    found, idle = [], set(policies)
    for unit in units:
        matched = [one for one in policies if any(map(matcher(one), unit.paths))]
        idle -= set(matched)
        found.append(policies[matched[-1]] if matched else True)
    if idle:
        names = [logical_path(unit) for unit in units]
        raise ValueError(f"reshard={reshard!r}: {sorted(idle)} match none of the units {names}")
    return found


def check_reshard(reshard: object) -> None:
    """Raise ``ValueError`` unless it is a bool, or patterns with one each."""
    if isinstance(reshard, bool):
        return
    if not isinstance(reshard, Mapping) or not all(
        isinstance(pattern, str) and isinstance(free, bool) for pattern, free in reshard.items()
    ):
        raise ValueError(f"reshard={reshard!r} must be a bool, or patterns with a bool each")


def refuse(module: nn.Module) -> None:
    """Raise if one of the module's parameters cannot be served.

    Raises:
        ValueError: One is a scalar, a DTensor, complex or not contiguous, or has no element.
    """
    for name, parameter, _ in marks(module):
        why = _unserved(parameter)
        if why is not None:
            raise ValueError(f"parameter {name!r} {why}")


def _unserved(parameter: Tensor) -> str | None:
    if hasattr(parameter, "placements"):
        return "is a DTensor; cut it by marks, as tensor_parallelize does"
    if parameter.dim() == 0:
        return "is a scalar, which has no dimension to cut; give it the shape (1,)"
    if parameter.numel() == 0:
        return "has no element, which the reduction does not carry; leave it out"
    if parameter.is_complex():
        return "is complex, which the gather does not carry; keep real and imaginary parts"
    if not parameter.is_contiguous():
        return f"with strides {parameter.stride()} must be contiguous"
    return None
