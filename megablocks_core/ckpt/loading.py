"""Fill ``state`` from a checkpoint, whatever layout it was saved under."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megablocks_core.ckpt.entries import (
    Owner,
    find_owners,
    group_tensor,
    grouped_owners,
    kind_of,
)
from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.places import place_of
from megablocks_core.ckpt.stored import Stored, StoredTensor
from megablocks_core.groups import (
    LOCAL,
    Group,
    ShardSpec,
    load_slices,
    logical_shape,
    logical_tensors,
    together,
)


class LoadReport(NamedTuple):
    """What did not fit: names that ``state`` has and the checkpoint lacks, and the reverse."""

    missing: list[str]
    unexpected: list[str]


def load(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    group: Group = LOCAL,
    strict: bool = True,
) -> LoadReport:
    """Fill ``state`` from the checkpoint ``path``, at any layout.

    Modules, optimizers and tensors are filled in place, JSON values are set in ``state``.
    Every rank reads its own slices; every block of a file that is read is checked against
    its hash. Sends a few small messages.

    Args:
        path: The checkpoint's folder, or a URL that fsspec knows.
        state: As for ``save``; JSON values there are only names for what will be set.
        group: All ranks that load.
        strict: Names that are missing on either side raise. Shapes and dtypes must agree
            in any case.

    Returns:
        The names that are missing on either side (none if ``strict``).

    Raises:
        ValueError: ``state`` does not fit the checkpoint; nothing was changed.
        CheckpointError: The checkpoint is not whole or is damaged, or another rank failed.
            When damage shows only while tensors are read, ``state`` is partly filled.
    """
    task = f"load({str(path)!r})"
    with together(task, group=group, raises=CheckpointError):
        place = place_of(path)
        stored = Stored(place)
        if group.rank == 0:
            stored.check_rest()
    if len(set(group.all_gather_object(stored.manifest.digest))) > 1:
        raise CheckpointError(f"{task}: ranks see different checkpoints under this path")
    with together(task, group=group, raises=CheckpointError):
        plan = _Plan(state, stored)
        plan.check(str(place), strict=strict)
    with together(task, group=group, raises=CheckpointError):
        plan.fill(state)
    return plan.report


class _Plan:
    """What goes where; made and checked before anything is changed."""

    def __init__(self, state: Mapping[str, Any], stored: Stored) -> None:
        self._stored = stored
        self._fills: list[tuple[Tensor, tuple[ShardSpec, ...], StoredTensor]] = []
        self._optimizers: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []
        self._values: dict[str, Any] = {}
        self._missing: list[str] = []
        self._used: set[str] = set()
        self._fitting: set[str] = set()
        self._faults: list[str] = []
        owners = find_owners(state)
        for name, value in state.items():
            self._entry(name, value, owners)
        unused = [name for name in stored.manifest.state if name not in state]
        unused += [
            name
            for name in stored.tensors
            if name not in self._used and name.partition("/")[0] in self._fitting
        ]
        self.report = LoadReport(self._missing, unused)

    def check(self, path: str, *, strict: bool) -> None:
        faults = list(self._faults)
        if strict and self.report.missing:
            faults.append(f"the checkpoint lacks {_first(self.report.missing)}")
        if strict and self.report.unexpected:
            faults.append(f"state lacks {_first(self.report.unexpected)}")
        if faults:
            raise ValueError(f"state does not fit {path}: {_first(faults, between='; ')}")

    def fill(self, state: MutableMapping[str, Any]) -> None:
        for tensor, specs, source in self._fills:
            load_slices(tensor, specs, source)
        for optimizer, packed in self._optimizers:
            _load_optimizer(optimizer, packed)
        state.update(self._values)

    def _entry(self, name: str, value: Any, owners: dict[int, Owner]) -> None:
        if name not in self._stored.manifest.state:
            self._missing.append(name)
            return
        entry = self._stored.manifest.state[name]
        kind = kind_of(name, value)
        if kind != entry["kind"]:
            self._faults.append(f"{name} is a {kind}, saved as a {entry['kind']}")
            return
        self._fitting.add(name)
        if kind == "module":
            self._module(name, value)
        elif kind == "tensor":
            self._tensor(f"{name}/{name}", value, ())
        elif kind == "optimizer":
            self._optimizer(name, value, entry["value"], owners)
        else:
            self._values[name] = entry["value"]

    def _module(self, entry: str, module: nn.Module) -> None:
        wanted = [
            (f"{entry}/{name}", tensor, specs) for name, tensor, specs in logical_tensors(module)
        ]
        served = {id(tensor) for name, tensor, _ in wanted if name in self._stored.tensors}
        for name, tensor, specs in wanted:
            if name in self._stored.tensors or id(tensor) not in served:
                self._tensor(name, tensor, specs)

    def _tensor(self, name: str, tensor: Tensor, specs: tuple[ShardSpec, ...]) -> None:
        if name not in self._stored.tensors:
            self._missing.append(name)
            return
        self._used.add(name)
        source = self._stored.tensors[name]
        want, have = logical_shape(tensor, specs), tuple(source.get_shape())
        if tensor.is_meta:
            self._faults.append(f"{name} is on meta; give it memory first")
        if want != have:
            self._faults.append(f"{name} has shape {want}, saved with {have}")
        if tensor.dtype != source.dtype:
            self._faults.append(f"{name} has dtype {tensor.dtype}, saved with {source.dtype}")
        self._fills.append((tensor, specs, source))

    def _optimizer(
        self,
        entry: str,
        optimizer: torch.optim.Optimizer,
        saved: dict[str, Any],
        owners: dict[int, Owner],
    ) -> None:
        """Plan new state tensors, of this rank's share, and the state dict that holds them."""
        members = grouped_owners(entry, optimizer, owners)
        have = [[owner.name for _, owner in pairs] for pairs in members]
        want = [group["names"] for group in saved["param_groups"]]
        if have != want:
            self._faults.append(f"{entry} has the parameter groups {have}, saved with {want}")
            self._fitting.remove(entry)
            return
        stored: dict[str, list[str]] = {}
        for name in self._stored.tensors:
            if name.startswith(f"{entry}/"):
                stored.setdefault(name.removeprefix(f"{entry}/").rpartition("/")[0], []).append(
                    name
                )
        fields: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for index, pairs in enumerate(members):
            values = self._hyperparameters(entry, optimizer, index, saved)
            groups.append({**values, "params": list(range(number, number + len(pairs)))})
            for parameter, owner in pairs:
                tensors = self._state(parameter, owner, stored.get(owner.name, []))
                held = {**saved["state"][owner.name], **tensors}
                if held:
                    fields[number] = held
                number += 1
        self._optimizers.append((optimizer, {"state": fields, "param_groups": groups}))

    def _hyperparameters(
        self,
        entry: str,
        optimizer: torch.optim.Optimizer,
        index: int,
        saved: dict[str, Any],
    ) -> dict[str, Any]:
        current = optimizer.param_groups[index]
        values = dict(saved["param_groups"][index]["values"])
        for key, value in current.items():
            if isinstance(value, tuple) and isinstance(values.get(key), list):
                values[key] = tuple(values[key])
            name = f"{entry}/{group_tensor(index, key)}"
            if isinstance(value, Tensor) and name in self._stored.tensors:
                values[key] = torch.empty_like(value)
                self._tensor(name, values[key], ())
        return values

    def _state(self, parameter: Tensor, owner: Owner, names: list[str]) -> dict[str, Tensor]:
        fields = {}
        for name in names:
            source = self._stored.tensors[name]
            whole = tuple(source.get_shape())
            specs = owner.specs_for(whole, owner.shape, name)
            shape = tuple(parameter.shape) if specs else whole
            device = parameter.device if shape else "cpu"
            field = torch.empty(shape, dtype=source.dtype, device=device)
            self._tensor(name, field, specs)
            fields[name.rpartition("/")[2]] = field
        return fields


def _first(texts: list[str], *, between: str = ", ") -> str:
    """The first three; a model of another size would fill pages."""
    more = f"{between}and {len(texts) - 3} more" if len(texts) > 3 else ""
    return between.join(texts[:3]) + more


def _load_optimizer(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    """``load_state_dict``, which casts to each parameter's dtype; here dtypes stay as saved."""
    optimizer.load_state_dict(packed)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for number, fields in packed["state"].items():
        loaded = optimizer.state[parameters[number]]
        for key, value in fields.items():
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)
