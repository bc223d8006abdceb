"""Whom an optimizer trains: parameters with their names, marks and parameter groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megablocks_core.groups import Specs, marks
from megablocks_core.parallel.checks import as_list, check_groups
from megablocks_core.parallel.data_parallel.buckets import Described

_SERVED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_REPLICATED = Specs()


class Member(NamedTuple):
    """A parameter that is trained.

    Attributes:
        name: Its logical name, or its number in a list without names.
        parameter: It.
        specs: Its marks.
        home: The number of its parameter group.
    """

    name: str
    parameter: nn.Parameter
    specs: Specs
    home: int


def find_members(
    module_or_parameters: Any, groups: Iterable[Mapping[str, Any]] | None
) -> tuple[list[Member], list[dict[str, Any]]]:
    """The parameters that are trained, in the order of the module, and the parameter groups.

    Args:
        module_or_parameters: A module, of which all parameters that require a gradient are
            trained; or parameters, pairs of name and parameter, or parameter groups, as torch's
            optimizers take them. Those are whole: without a module no mark is known.
        groups: Parameter groups that divide the parameters of the module.

    Raises:
        ValueError: Groups come without a module; they leave out a parameter that is trained, or
            have one twice or one of another module; there is none; or one is not served: a
            DTensor, one on meta, of another dtype, or one that shares memory with another.
    """
    if groups is not None:
        groups = check_groups("groups", groups)
    known: dict[int, tuple[str, Specs]] | None = None
    if isinstance(module_or_parameters, nn.Module):
        known = {id(p): (name, specs) for name, p, specs in marks(module_or_parameters)}
        trained = [p for p in module_or_parameters.parameters() if p.requires_grad]
        wanted = [{"params": trained}] if groups is None else [dict(group) for group in groups]
    elif groups is None:
        wanted = _as_groups(module_or_parameters)
    else:
        raise ValueError("groups must be None where parameters are given, and no module")
    members = list(_members(wanted, known))
    if not members:
        raise ValueError("module_or_parameters must have a parameter that is trained")
    for member in members:
        _check(member.name, member.parameter)
    _check_memory(members)
    if isinstance(module_or_parameters, nn.Module) and known is not None:
        check_complete(module_or_parameters, members)
        order = {identity: place for place, identity in enumerate(known)}
        members.sort(key=lambda member: order[id(member.parameter)])
    return members, wanted


def _as_groups(parameters: Any) -> list[dict[str, Any]]:
    if isinstance(parameters, Tensor):
        raise ValueError("module_or_parameters must be a module or an iterable, and no tensor")
    if not isinstance(parameters, Iterable) or isinstance(parameters, str | bytes | Mapping):
        raise ValueError(
            f"module_or_parameters={parameters!r} must be a module, or an iterable of parameters, "
            "of names with parameters or of parameter groups"
        )
    found = list(parameters)
    if found and isinstance(found[0], Mapping):
        return [dict(group) for group in check_groups("module_or_parameters", found)]
    return [{"params": found}]


def _members(
    wanted: list[dict[str, Any]], known: Mapping[int, tuple[str, Specs]] | None
) -> Iterator[Member]:
    """The members of parameter groups, whose ``params`` become lists of parameters alone."""
    seen: set[int] = set()
    for home, group in enumerate(wanted):
        group["params"], names = _named(group, first=len(seen))
        for name, parameter in zip(names, group["params"], strict=True):
            specs = _REPLICATED
            if known is not None:
                if id(parameter) not in known:
                    raise ValueError(f"groups[{home}] must hold the module's parameters: {name!r}")
                name, specs = known[id(parameter)]
            if id(parameter) in seen:
                raise ValueError(f"parameter {name!r} must be in one parameter group, and once")
            seen.add(id(parameter))
            yield Member(name, parameter, specs, home)


def _named(group: dict[str, Any], *, first: int) -> tuple[list[Any], list[str]]:
    """A group's parameters and their names."""
    found = as_list(group["params"])
    if found and all(map(_is_pair, found)):
        return [parameter for _, parameter in found], [name for name, _ in found]
    for part in found:
        if not isinstance(part, Tensor):
            raise ValueError(
                f"params with {part!r} in them must be parameters, or names with parameters"
            )
    names = group.get("param_names") or [str(first + index) for index in range(len(found))]
    names = as_list(names)
    if len(names) != len(found) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"param_names={names!r} must be {len(found)} words, one for each of params"
        )
    return found, names


def _is_pair(part: object) -> bool:
    match part:
        case (str(), Tensor()):
            return True
    return False


def check_complete(module: nn.Module, members: Sequence[Member]) -> None:
    """Raise if ``module`` trains a parameter that is not among ``members``.

    Raises:
        ValueError: It does: one was added, unfrozen or replaced.
    """
    known = {id(member.parameter) for member in members}
    if all(id(one) in known for one in module.parameters() if one.requires_grad):
        return
    strange = [name for name, one, _ in marks(module) if one.requires_grad and id(one) not in known]
    raise ValueError(
        f"parameters {strange} must be in a parameter group when the optimizer is made: make "
        "another one after adding, unfreezing or replacing them"
    )


def described(members: Sequence[Member]) -> list[Described]:
    """What the buckets of parameters depend on; an index is a place in ``members``."""
    return [
        Described(index, one.numel(), one.dtype, one.device, specs.expert)
        for index, (_, one, specs, _) in enumerate(members)
    ]


def _check(name: str, parameter: Tensor) -> None:
    if hasattr(parameter, "placements"):
        raise ValueError(
            f"parameter {name!r} is a DTensor: it is sharded already, so its own optimizer is "
            "sharded too; use optimizer_class itself"
        )
    if not parameter.requires_grad:
        raise ValueError(f"parameter {name!r} must require a gradient, or be left out")
    if parameter.is_meta or parameter.dtype not in _SERVED:
        raise ValueError(
            f"parameter {name!r} of {parameter.dtype} on {parameter.device} must be of "
            "16, 32 or 64 floating-point bits, and hold its values"
        )


def _check_memory(members: Sequence[Member]) -> None:
    """Parameters become views of buffers, which would part two that share memory."""
    places = sorted(
        (str(m.parameter.device), m.parameter.data_ptr(), m.parameter.nbytes, m.name)
        for m in members
        if m.parameter.numel()
    )
    for (device, start, size, name), (after, second, _, other) in zip(
        places, places[1:], strict=False
    ):
        if device == after and second < start + size:
            raise ValueError(f"parameters {name!r} and {other!r} must not share memory")
