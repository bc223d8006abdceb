"""The parameter groups of a saved optimizer, matched with those here by the names in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megablocks_core.ckpt.state.optimizers import Owner


class SavedGroups:
    """Which saved group each parameter group gets its hyperparameters from.

    Args:
        entry: Name of the optimizer in ``state``.
        saved: Its groups in the manifest.
        members: The owners of the parameters of each group here.

    Attributes:
        homes: For each group the index of the saved one, ``None`` if it has none.
        missing: Parameters that are in no saved group, as "entry/name".
        asked: Those that are in one.
        faults: What does not fit.
    """

    def __init__(
        self, entry: str, saved: Sequence[Mapping[str, Any]], members: Sequence[Sequence[Owner]]
    ) -> None:
        self._entry, self._saved = entry, saved
        self.homes: list[int | None] = []
        self.missing: list[str] = []
        self.asked: set[str] = set()
        self.faults: list[str] = []
        of = {name: index for index, group in enumerate(saved) for name in group["names"]}
        taken: dict[int, int] = {}
        for index, owners in enumerate(members):
            home = self._home(index, owners, of)
            if owners and home is not None and taken.setdefault(home, index) != index:
                self.faults.append(
                    f"{entry} has two parameter groups, {taken[home]} and {index}, of what was "
                    "saved as one"
                )
            self.homes.append(home)

    def options(self, index: int) -> dict[str, Any] | None:
        """The saved hyperparameters of a group here, ``None`` if nothing of it was saved."""
        home = self.homes[index]
        return None if home is None else dict(self._saved[home]["values"])

    def _home(self, index: int, owners: Sequence[Owner], of: Mapping[str, int]) -> int | None:
        found: dict[int, str] = {}
        for owner in owners:
            for name in owner.names:
                if name in of:
                    self.asked.add(f"{self._entry}/{name}")
                    found.setdefault(of[name], name)
                else:
                    self.missing.append(f"{self._entry}/{name}")
        if len(found) > 1:
            self.faults.append(
                f"{self._entry} has one parameter group, {index}, of what was saved as several: "
                f"{list(found.values())}"
            )
        if not owners and index < len(self._saved):
            return index
        return min(found, default=None)
