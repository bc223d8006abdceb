"""A torch optimizer as the target of a load: its state is made, filled, and then taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megablocks_core.ckpt.manifest import DTYPES, Manifest, StoredAs
from megablocks_core.ckpt.state.optimizers import MASTER, Owner, group_tensor, grouped_owners
from megablocks_core.ckpt.state.saved_groups import SavedGroups
from megablocks_core.ckpt.state.shares import Piece, Share, tensor_shares
from megablocks_core.groups import Group


class TorchTarget:
    """State tensors for what is stored of a torch optimizer's parameters.

    Tensors that the optimizer has in the saved shape and dtype are filled in place. Groups of
    parameters are matched by the names in them.

    Args:
        entry: Name in ``state``.
        optimizer: It.
        saved: Its value in the manifest.
        manifest: What is stored.
        owners: The owners of all parameters.
        group: All ranks that load.

    Attributes:
        shares: Memory to fill.
        missing: Parameters of which nothing is known, as "entry/name".
        asked: Those that are known.
        faults: What does not fit.
    """

    def __init__(
        self,
        entry: str,
        optimizer: torch.optim.Optimizer,
        saved: Mapping[str, Any],
        manifest: Manifest,
        owners: Mapping[int, Owner],
        group: Group,
    ) -> None:
        self._entry, self._optimizer, self._group = entry, optimizer, group
        self._saved, self._manifest = saved, manifest
        self.shares: list[Share] = []
        # Numbers of stacks: one for each tensor in the stack, which must be equal.
        self._numbers: list[tuple[str, Tensor, Tensor]] = []
        self._fields: dict[int, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        stored = _by_parameter(entry, manifest)
        members = grouped_owners(entry, optimizer, owners)
        homes = SavedGroups(entry, saved["param_groups"], members)
        self.missing, self.asked, self.faults = homes.missing, homes.asked, homes.faults
        number = 0
        for index, mine in enumerate(members):
            values = self._hyperparameters(index, homes)
            self._groups.append({**values, "params": list(range(number, number + len(mine)))})
            for owner in mine:
                fields = self._state(owner, stored)
                if fields:
                    self._fields[number] = fields
                number += 1

    def finish(self) -> None:
        """Hand everything to the optimizer, keeping the dtypes of the tensors.

        Raises:
            ValueError: The tensors of a stack have different numbers (such as steps).
        """
        for name, number, all_ in self._numbers:
            if not (all_ == all_[0]).all():
                raise ValueError(
                    f"{name} must be one number for all in a stack, saved as {all_.tolist()}"
                )
            number.copy_(all_[0])
        self._optimizer.load_state_dict({"state": self._fields, "param_groups": self._groups})
        parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
        for number, fields in self._fields.items():
            loaded = self._optimizer.state[parameters[number]]
            for key, value in fields.items():
                # load_state_dict casts to the parameter's dtype; here dtypes stay as saved.
                if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)

    def _hyperparameters(self, index: int, homes: SavedGroups) -> dict[str, Any]:
        current, home = self._optimizer.param_groups[index], homes.homes[index]
        values = homes.options(index)
        if home is None or values is None:
            return {key: value for key, value in current.items() if key != "params"}
        for key, value in current.items():
            if isinstance(value, tuple) and isinstance(values.get(key), list):
                values[key] = tuple(values[key])
            name = group_tensor(self._entry, home, key)
            if isinstance(value, Tensor) and str(name) in self._manifest.tensors:
                values[key] = torch.empty_like(value)
                self.shares += tensor_shares(name, values[key], (), group=self._group, whole=False)
        return values

    def _state(self, owner: Owner, stored: Mapping[str, dict[str, StoredAs]]) -> dict[str, Any]:
        """Everything stored of one parameter, or of all that this rank holds of a stack."""
        fields: dict[str, Any] = {}
        for name in [owner.name, *owner.names]:
            fields |= self._saved["state"].get(name, {})
        tensors: dict[str, StoredAs] = {}
        for name in [owner.name, *owner.names]:
            tensors |= stored.get(name, {})
        tensors.pop(MASTER, None)
        for field, one in tensors.items():
            tensor = self._tensor(owner, field, one)
            fields[field] = tensor
            if one.shape or owner.names == [owner.name]:
                self.shares += owner.shares(self._entry, field, tensor, self._group)
            else:
                all_ = torch.empty(len(owner.names), dtype=tensor.dtype)
                for name, number in zip(owner.names, all_, strict=True):
                    full = f"{self._entry}/{name}/{field}"
                    self.shares.append(Share(full, number.dtype, (), [Piece((), number)], False))
                self._numbers.append((f"{self._entry}/{owner.name}/{field}", tensor, all_))
        return fields

    def _tensor(self, owner: Owner, field: str, stored: StoredAs) -> Tensor:
        """The optimizer's own tensor if it is as the saved one, else a new one."""
        dtype, parameter = DTYPES[stored.dtype], owner.parameter
        is_alike = bool(stored.shape) and stored.shape == owner.shape
        shape = tuple(parameter.shape) if is_alike else stored.shape
        own = self._optimizer.state.get(parameter, {}).get(field)
        if isinstance(own, Tensor) and (tuple(own.shape), own.dtype) == (shape, dtype):
            return own
        if is_alike:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=parameter.device if shape else "cpu")


def _by_parameter(entry: str, manifest: Manifest) -> dict[str, dict[str, StoredAs]]:
    """The stored fields of each parameter of one optimizer."""
    found: dict[str, dict[str, StoredAs]] = {}
    for name, stored in manifest.tensors.items():
        first, _, rest = name.partition("/")
        if first == entry:
            parameter, _, field = rest.rpartition("/")
            found.setdefault(parameter, {})[field] = stored
    return found
