"""What this rank wants of a checkpoint, and where it goes; nothing is changed yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from itertools import chain, compress
from typing import Any

import torch
from torch import nn

from megablocks_core.ckpt.arguments import short
from megablocks_core.ckpt.manifest import DTYPES, Manifest
from megablocks_core.ckpt.state.entries import kind_of
from megablocks_core.ckpt.state.logical import LogicalOptimizer, TorchLikeOptimizer
from megablocks_core.ckpt.state.optimizers import (
    MASTER,
    Owner,
    field_shares,
    find_owners,
    owner_of,
)
from megablocks_core.ckpt.state.saved_groups import SavedGroups
from megablocks_core.ckpt.state.shares import Name, Share, joined, tensor_shares
from megablocks_core.ckpt.state.torch_targets import TorchTarget
from megablocks_core.groups import Group, logical_tensors

Cast = Mapping[torch.dtype, torch.dtype]


class Wanted:
    """``state`` held against a manifest.

    Args:
        state: As for ``load``.
        manifest: What is stored.
        group: All ranks that load.
        cast: Saved dtypes, and the other dtype that a tensor may have instead.

    Attributes:
        shares: Memory to fill, of tensors that are stored.
        missing: Names that are not stored.
        asked: Names that are, of entries and of optimizers' parameters.
        faults: What does not fit.
    """

    def __init__(
        self, state: Mapping[str, Any], manifest: Manifest, *, group: Group, cast: Cast
    ) -> None:
        self._manifest, self._group, self._cast = manifest, group, cast
        self.shares: list[Share] = []
        self.missing: list[str] = []
        self.asked: set[str] = set()
        self.faults: list[str] = []
        self._values: dict[str, Any] = {}
        self._finish: list[Callable[[], None]] = []
        owners = find_owners(state)
        for name, value in state.items():
            self._entry(name, value, owners)

    def finish(self, state: MutableMapping[str, Any]) -> None:
        """What follows once all memory is filled: hyperparameters, and values into ``state``.

        Raises:
            ValueError: A stack of tensors has one number for all where they have several.
        """
        for step in self._finish:
            step()
        state.update(self._values)

    def _entry(self, name: str, value: Any, owners: dict[int, Owner]) -> None:
        kind = kind_of(name, value)
        entry = self._manifest.state.get(name)
        if entry is None:
            self.missing.append(name)
            return
        self.asked.add(name)
        if kind != entry["kind"]:
            self.faults.append(f"{name} is a {kind}, saved as a {entry['kind']}")
        elif kind == "module":
            self._module(name, value)
        elif kind == "tensor":
            self._want(tensor_shares(Name(name, name), value, (), group=self._group))
        elif kind == "json":
            self._values[name] = entry["value"]
        elif isinstance(value, TorchLikeOptimizer):
            self._torch_like(name, value, entry["value"], owners)
        elif isinstance(value, LogicalOptimizer):
            self._logical(name, value, entry["value"], owners)
        elif "param_groups" not in entry["value"]:
            self.faults.append(f"{name} is a torch optimizer, saved by one of another kind")
        else:
            self._torch(name, value, entry["value"], owners)

    def _module(self, entry: str, module: nn.Module) -> None:
        """Want each tensor under all its names that are stored, or miss it under the first."""
        aliases: dict[int, list[list[Share]]] = {}
        for name, tensor, specs in logical_tensors(module):
            shares = tensor_shares(Name(entry, name), tensor, specs, group=self._group)
            aliases.setdefault(id(tensor), []).append(shares)
        for names in aliases.values():
            stored = [
                shares
                for shares in names
                if any(share.name in self._manifest.tensors for share in shares)
            ]
            for shares in stored or names[:1]:
                self._want(shares)

    def _torch(
        self,
        entry: str,
        optimizer: torch.optim.Optimizer,
        saved: dict[str, Any],
        owners: dict[int, Owner],
    ) -> None:
        target = TorchTarget(entry, optimizer, saved, self._manifest, owners, self._group)
        self.faults += target.faults
        self.missing += target.missing
        self.asked |= target.asked
        self._want(target.shares)
        self._finish.append(target.finish)

    def _torch_like(
        self,
        entry: str,
        optimizer: TorchLikeOptimizer,
        saved: dict[str, Any],
        owners: dict[int, Owner],
    ) -> None:
        """Want what is stored of each field that the optimizer may have."""
        if "param_groups" not in saved:
            self.faults.append(f"{entry} is as a torch optimizer, saved by one of another kind")
            return
        if saved["state"]:
            self.faults.append(f"{entry} was saved with numbers, which must be tensors here")
        groups = optimizer.logical_state().groups or ()
        members = [[owner_of(entry, one, owners) for one in mine] for mine, _ in groups]
        homes = SavedGroups(entry, saved["param_groups"], members)
        self.faults += homes.faults
        self.missing += homes.missing
        self.asked |= homes.asked
        targets = optimizer.logical_targets()
        found = [field_shares(entry, [target], owners, self._group) for target in targets]
        filled = [all(share.name in self._manifest.tensors for share in part) for part in found]
        self._want(joined(chain(*compress(found, filled))))
        # A parameter was stepped before it was saved, and has all fields, or it has none.
        stepped = {id(one) for one, field, *_ in compress(targets, filled) if field != MASTER}
        for (parameter, field, *_), part, there in zip(targets, found, filled, strict=True):
            if id(parameter) in stepped and field != MASTER and not there:
                self.missing += [share.name for share in part]

        def finish() -> None:
            options = [homes.options(index) for index in range(len(members))]
            optimizer.load_logical_groups(options, filled)
            optimizer.load_logical_values(saved.get("values"))

        self._finish.append(finish)

    def _logical(
        self,
        entry: str,
        optimizer: LogicalOptimizer,
        saved: dict[str, Any],
        owners: dict[int, Owner],
    ) -> None:
        if "param_groups" in saved:
            self.faults.append(f"{entry} publishes logical_state(), saved by a torch optimizer")
            return
        fields = optimizer.logical_state().fields
        self._want(joined(field_shares(entry, fields, owners, self._group)))
        self._finish.append(lambda: optimizer.load_logical_values(saved["values"]))

    def _want(self, shares: list[Share]) -> None:
        for share in shares:
            stored = self._manifest.tensors.get(share.name)
            if stored is None:
                self.missing.append(share.name)
                continue
            if share.shape != stored.shape:
                self.faults.append(
                    f"{share.name} has shape {share.shape}, saved with {stored.shape}"
                )
            dtype = DTYPES[stored.dtype]
            if share.dtype not in (dtype, self._cast.get(dtype)):
                self.faults.append(f"{share.name} has dtype {share.dtype}, saved with {dtype}")
            self.shares.append(share)


def check_cast(cast: Cast) -> None:
    """Refuse a policy between kinds of numbers.

    Raises:
        ValueError: It is no mapping of dtypes, or names one that is not floating-point.
    """
    if not isinstance(cast, Mapping):
        raise ValueError(f"cast={short(cast)} must map dtypes to dtypes")
    for dtype in chain.from_iterable(cast.items()):
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"cast={dict(cast)} must be from and to floating-point dtypes")


def unexpected(manifest: Manifest, asked: set[str], wanted: set[str]) -> list[str]:
    """Names that are stored and that no rank asks for.

    Args:
        manifest: What is stored.
        asked: What any rank's ``Wanted.asked`` says.
        wanted: Names of the tensors that any rank wants.
    """
    found = [entry for entry in manifest.state if entry not in asked]
    unused: set[str] = set()
    for entry, one in manifest.state.items():
        if entry in asked and one["kind"] == "optimizer":
            groups = one["value"].get("param_groups", [])
            names = [f"{entry}/{name}" for group in groups for name in group["names"]]
            unused |= {name for name in names if name not in asked}
    found += sorted(unused)
    for name in manifest.tensors:
        if (
            name not in wanted
            and name.partition("/")[0] in asked
            and name.rpartition("/")[0] not in unused
            and not (name.endswith(f"/{MASTER}") and name.rpartition("/")[0] in asked)
        ):
            found.append(name)
    return found
