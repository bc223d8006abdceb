"""What ``state`` holds, as logical tensors and JSON values; the same view for save and load."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups import Held, ShardSpec, logical_shape, logical_tensors

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass
class Entries:
    """``state`` taken apart.

    Attributes:
        held: Tensors by "entry/name"; a tied tensor once, under its first name.
        state: What the manifest says of each entry.
    """

    held: list[Held] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


class Owner:
    """A parameter as the modules of ``state`` know it: "module/logical name" and its cuts."""

    def __init__(self, name: str, parameter: Tensor, specs: tuple[ShardSpec, ...]) -> None:
        self.name, self.specs = name, specs
        self.shape = logical_shape(parameter, specs)
        self.is_cut = any(spec.group.size > 1 for spec in specs)

    def specs_for(
        self, shape: tuple[int, ...], whole: tuple[int, ...], what: str
    ) -> tuple[ShardSpec, ...]:
        """Cuts of an optimizer tensor: the parameter's if it has its shape, none if it is not cut.

        Raises:
            ValueError: The parameter is cut, and the tensor is neither a scalar nor cut alike.
        """
        if shape == whole:
            return self.specs
        if shape and self.is_cut:
            raise ValueError(f"{what} of shape {shape} must have the shape {whole} of {self.name}")
        return ()


def take_apart(state: Mapping[str, Any]) -> Entries:
    """List all that ``state`` holds.

    Raises:
        ValueError: A name that is no file name, a value of another kind, an optimizer of a
            parameter that no module of ``state`` holds, or an optimizer tensor whose cut
            cannot be known.
    """
    entries = Entries()
    owners = find_owners(state)
    for name, value in state.items():
        kind = kind_of(name, value)
        entries.state[name] = {"kind": kind}
        if kind == "module":
            entries.held += module_tensors(name, value)
        elif kind == "tensor":
            entries.held.append(Held(f"{name}/{name}", value))
        elif kind == "optimizer":
            held, entries.state[name]["value"] = _optimizer(name, value, owners)
            entries.held += held
        else:
            entries.state[name]["value"] = value
    return entries


def kind_of(name: str, value: Any) -> str:
    """Kind of one entry of ``state``.

    Raises:
        ValueError: The name is no file name, or the value is of no kind that is served.
    """
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"state name {name!r} must be letters, digits, '_', '.' and '-'")
    for kind, types in _KINDS.items():
        if isinstance(value, types):
            return kind
    check_json(value, f"state[{name!r}]")
    return "json"


_KINDS = {"module": nn.Module, "optimizer": torch.optim.Optimizer, "tensor": Tensor}


def check_json(value: Any, what: str) -> None:
    """Refuse what JSON would change: tuples, keys that are not strings, NumPy scalars.

    Raises:
        ValueError: Such a value, named by its path below ``what``.
    """
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(f"{what} has the key {key!r}; keys must be strings")
            check_json(item, f"{what}[{key!r}]")
    elif type(value) is list:
        for index, item in enumerate(value):
            check_json(item, f"{what}[{index}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise ValueError(
            f"{what} of type {type(value).__name__} must be a module, torch optimizer, tensor "
            "or JSON value (str, int, float, bool, None, list, dict)"
        )


def module_tensors(entry: str, module: nn.Module) -> Iterator[Held]:
    """A module's tensors by "entry/logical name"; a tied one once."""
    for name, tensor, specs in logical_tensors(module, remove_duplicate=True):
        yield Held(f"{entry}/{name}", tensor, specs)


def find_owners(state: Mapping[str, Any]) -> dict[int, Owner]:
    """Who owns each parameter (by ``id``) of the modules in ``state``."""
    owners: dict[int, Owner] = {}
    for entry, module in state.items():
        if isinstance(module, nn.Module):
            for name, tensor, specs in module_tensors(entry, module):
                owners.setdefault(id(tensor), Owner(name, tensor, specs))
    return owners


def grouped_owners(
    entry: str, optimizer: torch.optim.Optimizer, owners: dict[int, Owner]
) -> list[list[tuple[Tensor, Owner]]]:
    """An optimizer's parameters with their owners, a list for each parameter group.

    Raises:
        ValueError: A parameter is held by no module.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in owners:
                raise ValueError(
                    f"state[{entry!r}] optimises a parameter of shape {tuple(parameter.shape)} "
                    "that must be held by a module of state"
                )
    return [
        [(parameter, owners[id(parameter)]) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def _optimizer(
    entry: str, optimizer: torch.optim.Optimizer, owners: dict[int, Owner]
) -> tuple[list[Held], dict[str, Any]]:
    held: list[Held] = []
    groups: list[dict[str, Any]] = []
    fields: dict[str, dict[str, Any]] = {}
    members = grouped_owners(entry, optimizer, owners)
    for index, (group, pairs) in enumerate(zip(optimizer.param_groups, members, strict=True)):
        values = {}
        for key, value in group.items():
            if isinstance(value, Tensor):
                held.append(Held(f"{entry}/{group_tensor(index, key)}", value))
            elif key != "params":
                values[key] = list(value) if isinstance(value, tuple) else value
        check_json(values, f"state[{entry!r}].param_groups[{index}]")
        groups.append({"names": [owner.name for _, owner in pairs], "values": values})
        for parameter, owner in pairs:
            values = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                name = f"{entry}/{owner.name}/{key}"
                if isinstance(value, Tensor):
                    specs = owner.specs_for(tuple(value.shape), tuple(parameter.shape), name)
                    held.append(Held(name, value, specs))
                else:
                    check_json(value, name)
                    values[key] = value
            fields[owner.name] = values
    return held, {"param_groups": groups, "state": fields}


def group_tensor(index: int, key: str) -> str:
    """Name of a hyperparameter that is a tensor, such as a capturable learning rate."""
    return f"param_groups.{index}/{key}"
