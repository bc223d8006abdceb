"""Has a module other parameters than before? Asked before every forward pass, so it is quick."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn


class ParameterWatch:
    """A module's parameters as they were: which, of which dtype, where, trained or frozen.

    It walks the tree once. Afterwards it looks at what each module holds, which is an order of
    magnitude cheaper than ``module.parameters()``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        owners = list(module.modules())
        self._held = [owner._modules for owner in owners]
        self._held += [owner._parameters for owner in owners]
        self._seen = self._now()

    def has_changed(self) -> bool:
        """Whether a parameter came, went, was frozen or unfrozen, got another dtype or moved."""
        return self._seen != self._now()

    def _now(self) -> list[list[Any]]:
        return [
            list(map(id, chain.from_iterable(map(dict.values, self._held)))),
            [one.requires_grad for one in self._parameters],
            [(one.dtype, one.device) for one in self._parameters],
        ]
