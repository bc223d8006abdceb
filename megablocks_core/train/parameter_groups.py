"""Parameter groups for any torch optimizer: who decays, who learns at which rate.

What a parameter is follows from its logical name and shape, those of one process, so a cut over
ranks changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from megablocks_core.groups import Specs, logical_shape, marks
from megablocks_core.groups.patterns import matcher

Shape = tuple[int, ...]

# Vectors by nature, also where a layer stores them as matrices.
_NEVER_DECAY = ("bias", "A_log", "D", "dt_bias")
_MEMBERS = ("params", "param_names")


@dataclass(frozen=True)
class Rule:
    """``options`` for the parameters that ``pattern`` and ``shape`` choose.

    Attributes:
        pattern: A logical name; ``*`` stands for any part of one step of it, ``**`` for any
            part: "**.router.weight", "model.layers.*.mlp.*".
        options: What the optimizer's group gets, such as ``{"lr": 1e-4}``.
        shape: Whether a parameter of this logical shape is meant; default: any. Of stacked
            experts it is the shape of one.
        needed: A rule that chooses nothing raises.

    Raises:
        ValueError: ``options`` has "params" or "param_names", which name what a group holds.
    """

    pattern: str
    options: Mapping[str, Any] = field(hash=False)
    shape: Callable[[Shape], bool] | None = None
    needed: bool = True

    def __post_init__(self) -> None:
        _check_options(self.options)

    def chooses(self, name: str, shape: Shape) -> bool:
        """Whether this rule is for a parameter of this name and shape."""
        return matcher(self.pattern)(name) and (self.shape is None or self.shape(shape))


class ParameterGroups(list[dict[str, Any]]):
    """Groups as torch's optimizers take them; ``print`` shows them as a table.

    Each has ``params``, ``param_names`` and its options.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], sizes: Mapping[str, int]) -> None:
        super().__init__(groups)
        self._sizes = dict(sizes)

    def __str__(self) -> str:
        options = list(dict.fromkeys(key for group in self for key in group))
        options = [key for key in options if key not in _MEMBERS]
        rows = [["tensors", "elements", *options, "parameters"]]
        for group in self:
            names = group["param_names"]
            elements = sum(self._sizes[name] for name in names)
            values = [str(group.get(key, "")) for key in options]
            rows.append([str(len(names)), f"{elements:,}", *values, ", ".join(_brief(names))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths[-1] = 0
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def decays(name: str, shape: Shape) -> bool:
    """Whether weight decay is usual: for matrices, but for no norm, bias, A_log, D or dt_bias."""
    last = name.rpartition(".")[2]
    return len(shape) >= 2 and last not in _NEVER_DECAY and not last.endswith("_bias")


def parameter_groups(
    module: nn.Module,
    options: Mapping[str, Any],
    rules: Sequence[Rule] = (),
    *,
    decay: Callable[[str, Shape], bool] = decays,
    mup_base: nn.Module | None = None,
) -> ParameterGroups:
    """Sort the parameters that are trained into groups of equal options.

        groups = parameter_groups(
            model,
            {"lr": 3e-3, "weight_decay": 0.1},
            [Rule("**.embed_tokens.weight", {"lr": 1e-3}), Rule("**.router.*", {"lr": 1e-4})],
        )
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    Every parameter that requires a gradient is in exactly one group, a tied one under its first
    name. It has ``options``, ``weight_decay`` 0 where ``decay`` says no, and then those of each
    rule that chooses it, later ones first if several do. Sends nothing.

    ``mup_base`` is the same model at the width at which ``options`` were found (on ``meta`` it
    costs nothing). Rates then follow muP for Adam and its kin: a matrix, head included, whose
    inputs are ``r`` times as many as there has its ``lr`` divided by ``r`` and its
    ``weight_decay`` multiplied by ``r``, so that AdamW shrinks weights as it does there;
    embeddings and vectors keep both. Initial values (deviation divided by ``sqrt(r)``, the
    head's by ``r``), and the logits of a tied head (divided by ``r``) are the model's part.

    Raises:
        ValueError: A rule chooses no parameter, ``module`` trains none, or ``mup_base`` has
            other names or numbers of dimensions, or comes without an ``lr`` to divide.
    """
    _check_options(options)
    rules = list(rules)
    found = list(_parameters(module))
    for rule in rules:
        if rule.needed and not any(rule.chooses(part.name, part.shape) for part in found):
            raise ValueError(f"rule {rule.pattern!r} must choose at least one parameter")
    trained = [part for part in found if part.parameter.requires_grad]
    if not trained:
        raise ValueError(f"module={type(module).__name__} must have a parameter that is trained")
    widths = {} if mup_base is None else _widths(found, list(_parameters(mup_base)))
    groups: list[dict[str, Any]] = []
    for part in trained:
        own = dict(options)
        if not decay(part.name, part.shape):
            own["weight_decay"] = 0.0
        for rule in rules:
            if rule.chooses(part.name, part.shape):
                own.update(rule.options)
        if mup_base is not None:
            own = _scaled(own, widths[part.name], part.name)
        group = _group_with(own, groups)
        group["params"].append(part.parameter)
        group["param_names"].append(part.name)
    return ParameterGroups(groups, {part.name: math.prod(part.whole) for part in trained})


def _check_options(options: Mapping[str, Any]) -> None:
    for name in _MEMBERS:
        if name in options:
            raise ValueError(
                f"options={sorted(options)} must not have {name!r}: a group holds what its "
                "rules choose"
            )


def _group_with(options: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The group of these options, which is added if there is none."""
    for group in groups:
        if {key: value for key, value in group.items() if key not in _MEMBERS} == options:
            return group
    groups.append({"params": [], "param_names": [], **options})
    return groups[-1]


class _Part(NamedTuple):
    """A parameter, its whole shape, and the shape that counts: of one, where many are stacked."""

    name: str
    parameter: nn.Parameter
    whole: Shape
    shape: Shape
    looked_up: bool


def _parameters(module: nn.Module) -> list[_Part]:
    looked_up = {
        id(weight)
        for part in module.modules()
        if hasattr(part, "num_embeddings")
        for weight in part.parameters(recurse=False)
    }
    return [_part(*found, id(found[1]) in looked_up) for found in marks(module)]


def _part(name: str, parameter: nn.Parameter, specs: Specs, looked_up: bool) -> _Part:
    whole = logical_shape(parameter, specs)
    return _Part(name, parameter, whole, whole if specs.each is None else whole[1:], looked_up)


def _widths(found: list[_Part], base: list[_Part]) -> dict[str, float]:
    """How many times as many inputs each matrix has as at the base width."""
    shapes = {part.name: part.shape for part in base}
    names = {part.name for part in found}
    if names != set(shapes) or any(len(p.shape) != len(shapes[p.name]) for p in found):
        differ = sorted(names ^ set(shapes)) or "the numbers of dimensions"
        raise ValueError(f"mup_base must be the same model at another width; different: {differ}")
    return {
        part.name: 1.0
        if part.looked_up
        else math.prod(part.shape[1:]) / math.prod(shapes[part.name][1:])
        for part in found
    }


def _scaled(options: dict[str, Any], width: float, name: str) -> dict[str, Any]:
    if "lr" not in options:
        raise ValueError(f"options={options} of {name} must have an lr for mup_base to divide")
    decay = {"weight_decay": options["weight_decay"] * width} if "weight_decay" in options else {}
    return {**options, "lr": options["lr"] / width, **decay}


def _brief(names: Sequence[str]) -> list[str]:
    """Names with numbers as ``*``, each once."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
