"""Tensors of files, put together of ours as these come."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megablocks_core.export.layout import Rule
from megablocks_core.export.operations import lazy


class Joiner:
    """Makes tensors of files of ours, which come in any order.

    Args:
        rules: Say which of ours each is made of.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._owner = {name: rule for rule in rules for name in rule.ours}
        self._waiting: dict[int, dict[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """On-disk names and tensors, if ``tensor`` was the last that they lacked."""
        rule = self._owner[name]
        held = self._waiting.setdefault(id(rule), {})
        # What is handed over is used again.
        held[name] = tensor if len(held) + 1 == len(rule.ours) else tensor.clone()
        if len(held) < len(rule.ours):
            return {}
        del self._waiting[id(rule)]
        made = rule.to_theirs([lazy(held[ours]) for ours in rule.ours])
        return {theirs: whole[...] for theirs, whole in made.items()}
