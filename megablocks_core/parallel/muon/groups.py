"""Who is orthogonalised and who is left to AdamW, and each one's hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from megablocks_core.groups import Specs, logical_shape, marks
from megablocks_core.parallel.checks import (
    as_list,
    check_choice,
    check_flags,
    check_groups,
    check_number,
)
from megablocks_core.parallel.muon.matrices import MatrixLayout, matrix_layout

Shape = tuple[int, ...]

MUON, ADAMW = "muon", "adamw"

# What stores vectors as matrices, and the usual names of what reads and writes tokens.
_VECTORS = ("bias", "A_log", "D", "dt_bias")
_TOKENS = ("wte", "wpe", "lm_head", "head", "output", "classifier", "score")

_MEMBERS = ("params", "param_names")
_SHARE = "from 0 to below 1"


class Member(NamedTuple):
    """A parameter that is trained, and its matrices (``None``: AdamW's)."""

    name: str
    parameter: nn.Parameter
    specs: Specs
    layout: MatrixLayout | None


def is_hidden_matrix(name: str, shape: Shape) -> bool:
    """Whether Muon is usual: for matrices, but for no embedding and no head.

    Args:
        name: The logical name.
        shape: The logical shape; of stacked experts, of one.
    """
    steps = name.split(".")
    if len(shape) != 2 or min(shape) < 2:
        return False
    if steps[-1] in _VECTORS or steps[-1].endswith("_bias"):
        return False
    return not any(step in _TOKENS or "embed" in step for step in steps)


def muon_groups(
    module: nn.Module,
    groups: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], dict[int, Member]]:
    """The parameter groups, one for each algorithm of each given group, and their members.

    A parameter is Muon's by ``is_hidden_matrix``, unless its group has an "algorithm"; the weight
    of a module with ``num_embeddings`` is AdamW's.

    Args:
        module: The model.
        groups: As ``train.parameter_groups`` makes them; default one of all that is trained.
        options: The hyperparameters of each algorithm, which a group's own go before.

    Raises:
        ValueError: A group has an option that no algorithm knows, a parameter that is not
            trained or in another group, or says Muon of what is no matrix; or one that is
            trained is in no group.
    """
    looked_up = {
        id(parameter)
        for part in module.modules()
        if hasattr(part, "num_embeddings")
        for parameter in part.parameters(recurse=False)
    }
    known = {
        id(parameter): Member(name, parameter, specs, None)
        for name, parameter, specs in marks(module)
        if parameter.requires_grad
    }
    if not known:
        raise ValueError(f"module={type(module).__name__} must have a parameter that is trained")
    if groups is None:
        groups = [{"params": [member.parameter for member in known.values()]}]
    groups = check_groups("groups", groups)
    left, made, members = dict(known), [], {}
    for index, group in enumerate(groups):
        own = {key: value for key, value in group.items() if key not in _MEMBERS}
        chosen = own.pop("algorithm", None)
        _check_options(index, own, chosen, options)
        lists: dict[str, list[Member]] = {MUON: [], ADAMW: []}
        for parameter in as_list(group["params"]):
            if not isinstance(parameter, Tensor):
                raise ValueError(f"groups[{index}]: params with {parameter!r} must be parameters")
            member = left.pop(id(parameter), None)
            if member is None:
                raise ValueError(
                    f"groups[{index}] has a parameter of shape {tuple(parameter.shape)} that must "
                    "be one of the module that is trained, and in one group"
                )
            member = _placed(member, chosen, is_table=id(parameter) in looked_up)
            members[id(parameter)] = member
            lists[ADAMW if member.layout is None else MUON].append(member)
        for algorithm, mine in lists.items():
            fitting = {key: own[key] for key in own if key in options[algorithm]}
            made.append(
                {
                    "params": [member.parameter for member in mine],
                    "param_names": [member.name for member in mine],
                    "algorithm": algorithm,
                    **options[algorithm],
                    **fitting,
                }
            )
    if left:
        names = [member.name for member in left.values()]
        raise ValueError(f"groups must have every parameter that is trained: missing {names}")
    return made, members


def _placed(member: Member, chosen: str | None, *, is_table: bool) -> Member:
    shape = logical_shape(member.parameter, member.specs)
    shape = shape if member.specs.each is None else shape[1:]
    muon = chosen == MUON
    if chosen is None:
        muon = not is_table and is_hidden_matrix(member.name, shape)
    layout = matrix_layout(member.parameter, member.specs) if muon else None
    if muon and layout is None:
        raise ValueError(f"{member.name} of shape {shape} must be a matrix for Muon")
    return member._replace(layout=layout)


def _check_options(
    index: int,
    own: Mapping[str, Any],
    chosen: str | None,
    options: Mapping[str, Mapping[str, Any]],
) -> None:
    if chosen is not None:
        check_choice(f"groups[{index}]: algorithm", chosen, (MUON, ADAMW))
    known = set().union(*options.values()) if chosen is None else set(options[chosen])
    if unknown := sorted(set(own) - known):
        raise ValueError(f"groups[{index}] has {unknown}, which must be of {sorted(known)}")


def check_numbers(group: Mapping[str, Any]) -> None:
    """Refuse hyperparameters that are out of range.

    Raises:
        ValueError: One is.
    """
    for name in ("lr", "weight_decay", "eps"):
        if name in group:
            value = _number(group[name])
            check_number(name, value, "at least 0, and finite", lambda x: 0 <= x < math.inf)
    if "momentum" in group:
        check_number("momentum", group["momentum"], _SHARE, lambda x: 0 <= x < 1)
        check_flags(nesterov=group.get("nesterov", True))
        check_choice("adjust_lr", group.get("adjust_lr", "original"), tuple(ADJUSTMENTS))
        return
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas={betas!r} must be two numbers")
    for value in betas:
        check_number("one of betas", value, _SHARE, lambda x: 0 <= x < 1)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


# How far an orthogonal update of a matrix of rows x columns goes, in units of the rate: as in the
# post by Jordan et al.; with the root mean square of AdamW's (Liu et al., section 2.2); as it is.
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "none": lambda rows, columns: 1.0,
}
