"""Optimizer state by parameter: torch's own, and those that publish theirs (``logical.py``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.ckpt.json_values import check_json
from megablocks_core.ckpt.state.logical import LogicalField, LogicalOptimizer, TorchLikeOptimizer
from megablocks_core.ckpt.state.shares import Name, Share, flat_shares, number_shares, tensor_shares
from megablocks_core.groups import Group, Specs, logical_tensors, whole_shape

MASTER = "master"  # the field that holds weights, in a higher precision


class Owner:
    """A parameter as a module of ``state`` knows it.

    Attributes:
        parameter: It.
        name: "module/logical name".
        names: That or, of a stack, the names of the tensors in it that this rank holds a part of.
        shape: Of the whole parameter or, of a stack, of each tensor in it.
        is_cut: Whether any other rank holds another part.
    """

    def __init__(self, entry: str, logical: str, parameter: Tensor, specs: Specs) -> None:
        self.parameter = parameter
        self.specs = specs
        self._parts = (entry, logical)
        self.name = str(Name(*self._parts))
        self.is_cut = any(spec.group.size > 1 for spec in specs) or any(
            not placement.is_replicate() for placement in getattr(parameter, "placements", ())
        )
        shape = whole_shape(tuple(parameter.shape), specs)
        self.shape = shape if specs.each is None else shape[1:]
        numbers = self.shares("", "", torch.zeros(()), None)
        self.names = [share.name.strip("/") for share in numbers]

    def shares(
        self,
        entry: str,
        field: str,
        tensor: Tensor,
        group: Group | None,
        flat: tuple[int, int] | None = None,
    ) -> list[Share]:
        """The shares of one field of the parameter in the optimizer ``entry``.

        Raises:
            ValueError: The parameter is cut, and the tensor is neither a number nor cut alike.
        """
        module, logical = self._parts
        name = Name(f"{entry}/{module}" if entry else module, logical, field)
        local_shape = tuple(self.parameter.shape)
        if flat is not None:
            if hasattr(self.parameter, "placements"):
                raise ValueError(f"{name}: flat={flat} must be of a plain parameter, not a DTensor")
            assert group is not None
            return flat_shares(name, tensor, flat, self.specs, local_shape=local_shape, group=group)
        if tensor.dim() == 0:
            return number_shares(name, tensor, self.specs, local_shape=local_shape)
        assert group is not None
        alike = hasattr(tensor, "placements") == hasattr(self.parameter, "placements")
        if tuple(tensor.shape) == local_shape and alike:
            return tensor_shares(name, tensor, self.specs, group=group, whole=False)
        if self.is_cut:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} must be cut as {self.name} of shape "
                f"{local_shape} is"
            )
        return tensor_shares(name, tensor, (), group=group, whole=False)


def find_owners(state: Mapping[str, Any]) -> dict[int, Owner]:
    """Who owns each parameter (by ``id``) of the modules in ``state``."""
    owners: dict[int, Owner] = {}
    for entry, module in state.items():
        if isinstance(module, nn.Module):
            for name, tensor, specs in logical_tensors(module, remove_duplicate=True):
                if id(tensor) not in owners:
                    owners[id(tensor)] = Owner(entry, name, tensor, specs)
    return owners


def owner_of(entry: str, parameter: Tensor, owners: Mapping[int, Owner]) -> Owner:
    """The owner of a parameter of the optimizer ``entry``.

    Raises:
        ValueError: No module holds it.
    """
    if id(parameter) not in owners:
        raise ValueError(
            f"state[{entry!r}] optimises a parameter of shape {tuple(parameter.shape)} that must "
            "be held by a module of state"
        )
    return owners[id(parameter)]


def grouped_owners(
    entry: str, optimizer: torch.optim.Optimizer, owners: Mapping[int, Owner]
) -> list[list[Owner]]:
    """The owners of an optimizer's parameters, a list for each parameter group."""
    return [
        [owner_of(entry, parameter, owners) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def optimizer_entry(
    entry: str,
    optimizer: torch.optim.Optimizer | LogicalOptimizer,
    owners: Mapping[int, Owner],
    group: Group,
) -> tuple[list[Share], dict[str, Any]]:
    """The tensors of an optimizer, and what the manifest says of it."""
    if isinstance(optimizer, LogicalOptimizer):
        return logical_entry(entry, optimizer, owners, group)
    return torch_entry(entry, optimizer, owners, group)


def torch_entry(
    entry: str, optimizer: torch.optim.Optimizer, owners: Mapping[int, Owner], group: Group
) -> tuple[list[Share], dict[str, Any]]:
    """The tensors of a torch optimizer, and its JSON value: hyperparameters and other numbers.

    The value holds ``param_groups`` (the names of their parameters, and hyperparameters) and
    ``state`` (what is no tensor, by parameter).
    """
    shares: list[Share] = []
    groups: list[dict[str, Any]] = []
    fields: dict[str, dict[str, Any]] = {}
    members = grouped_owners(entry, optimizer, owners)
    for index, (param_group, mine) in enumerate(zip(optimizer.param_groups, members, strict=True)):
        values = {}
        for key, value in param_group.items():
            if isinstance(value, Tensor):
                shares += tensor_shares(
                    group_tensor(entry, index, key), value, (), group=group, whole=False
                )
            elif key != "params":
                values[key] = list(value) if isinstance(value, tuple) else value
        check_json(values, f"state[{entry!r}].param_groups[{index}]")
        groups.append({"names": [name for one in mine for name in one.names], "values": values})
        for owner in mine:
            numbers = {}
            for key, value in optimizer.state.get(owner.parameter, {}).items():
                if isinstance(value, Tensor):
                    shares += owner.shares(entry, key, value, group)
                else:
                    check_json(value, f"{entry}/{owner.name}/{key}")
                    numbers[key] = value
            if numbers:
                fields |= dict.fromkeys(owner.names, numbers)
    return shares, {"param_groups": groups, "state": fields}


def logical_entry(
    entry: str, optimizer: LogicalOptimizer, owners: Mapping[int, Owner], group: Group
) -> tuple[list[Share], dict[str, Any]]:
    """The tensors of an optimizer that publishes its state, and its JSON values.

    Those of a torch-like one are a torch optimizer's, beside what it calls values itself.
    """
    state = optimizer.logical_state()
    check_json(state.values, f"state[{entry!r}]")
    value: dict[str, Any] = {"values": state.values}
    if isinstance(optimizer, TorchLikeOptimizer):
        groups = []
        for index, (parameters, options) in enumerate(state.groups or ()):
            check_json(options, f"state[{entry!r}].param_groups[{index}]")
            mine = [owner_of(entry, parameter, owners) for parameter in parameters]
            names = [name for owner in mine for name in owner.names]
            groups.append({"names": names, "values": dict(options)})
        value |= {"param_groups": groups, "state": {}}
    return field_shares(entry, state.fields, owners, group), value


def field_shares(
    entry: str, fields: Sequence[LogicalField], owners: Mapping[int, Owner], group: Group
) -> list[Share]:
    """The shares of what an optimizer publishes."""
    shares: list[Share] = []
    for parameter, field, tensor, flat in fields:
        owner = owner_of(entry, parameter, owners)
        shares += owner.shares(entry, field, tensor, group, flat)
    return shares


def group_tensor(entry: str, index: int, key: str) -> Name:
    """Name of a hyperparameter that is a tensor, such as a capturable learning rate."""
    return Name(entry, f"param_groups.{index}", key)


def merge_optimizer(entry: str, values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The value of a torch optimizer whose parameters lie on several ranks.

    Raises:
        ValueError: Ranks differ in the number of parameter groups, in hyperparameters, in the
            group of a parameter, or in a number kept for a parameter.
    """
    what = f"state[{entry!r}]"
    merged: dict[str, Any] = {"param_groups": [], "state": {}}
    if "values" in values[0]:
        merged["values"] = values[0]["values"]
    homes: dict[str, int] = {}
    for rank, value in enumerate(values):
        _check_equal(what, values[0].get("values"), value.get("values"), rank)
        groups = value["param_groups"]
        if len(groups) != len(values[0]["param_groups"]):
            raise ValueError(
                f"{what} must have as many parameter groups on all ranks: rank 0 has "
                f"{len(values[0]['param_groups'])}, rank {rank} has {len(groups)}"
            )
        for index, group in enumerate(groups):
            if rank == 0:
                merged["param_groups"].append({"names": [], "values": group["values"]})
            known = merged["param_groups"][index]
            _check_equal(f"{what}.param_groups[{index}]", known["values"], group["values"], rank)
            for name in group["names"]:
                if homes.setdefault(name, index) != index:
                    raise ValueError(
                        f"{what}: {name} must be in one parameter group: it is in {homes[name]} "
                        f"and, on rank {rank}, in {index}"
                    )
            fresh = set(known["names"])
            known["names"] += [name for name in group["names"] if name not in fresh]
        for name, numbers in value["state"].items():
            known = merged["state"].setdefault(name, numbers)
            _check_equal(f"{what}.state[{name!r}]", known, numbers, rank)
    return merged


def _check_equal(what: str, first: Any, other: Any, rank: int) -> None:
    texts = [json.dumps(value, sort_keys=True) for value in (first, other)]
    if texts[0] != texts[1]:
        raise ValueError(
            f"{what} must be equal on all ranks: rank {rank} has {texts[1]}, one before it "
            f"{texts[0]}"
        )
