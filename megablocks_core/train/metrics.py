"""Metrics as exact sums and counts, so that a reported mean never depends on how it was cut.

A metric is a pair (sum, count) in float64. Pairs of micro-batches, steps and ranks are added and
divided once, where a mean is read. A logging interval, a micro-batch count, a split of the data
over ranks or a resume changes which pairs are added when, never their total.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, check_group


@final
class Mean(float):
    """A mean that remembers its sum and count: a float, ``sum / count`` (NaN without a count)."""

    __slots__ = ("count", "sum")
    sum: float
    count: float

    def __new__(cls, sum: float, count: float = 1.0) -> Mean:
        """Divide ``sum`` by ``count``, and keep both."""
        mean = super().__new__(cls, sum / count if count else math.nan)
        mean.sum, mean.count = float(sum), float(count)
        return mean

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.sum, self.count


def pooled(means: Iterable[Mean]) -> Mean:
    """The mean of everything that ``means`` count together: sum of sums over sum of counts."""
    means = list(means)
    return Mean(math.fsum(mean.sum for mean in means), math.fsum(mean.count for mean in means))


def check_state(state: object, keys: Iterable[str]) -> None:
    """Raise unless ``state`` is what ``state_dict`` gave: a dict that has ``keys``."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state of type {type(state).__name__} must be a dict from state_dict")
    if missing := [key for key in keys if key not in state]:
        raise ValueError(f"state={sorted(state)} must have {', '.join(missing)}")


class Metrics:
    """Adds up named metrics and reduces them over ``group`` in one message.

        metrics = Metrics("loss", "grad_norm", group=mesh.group("dp", "cp"))
        metrics.add("loss", loss_sum, num_tokens)    # a micro-batch; tensors cause no sync
        metrics.reduce()["loss"]                     # a Mean over all ranks, then from zero again

    ``group`` is the ranks that hold different data. Ranks that hold the same (tp) may be in it:
    sums and counts are then multiplied alike and means stay right. The names are fixed at
    construction, so that every rank sends the same message whatever it saw.

    Sent: ``reduce`` and ``state_dict`` all-reduce 16 bytes a name. ``device`` is where sums are
    kept: that of the losses, for a back end or a loop that must not wait for the host.

    Raises:
        ValueError: No name, a name twice, or ``add`` with a name that was not given or with a
            tensor of more than one element.
    """

    def __init__(
        self, *names: str, group: Group = LOCAL, device: torch.device | str | None = None
    ) -> None:
        if not names or len(set(names)) < len(names):
            raise ValueError(f"names={names} must be one or more different names")
        check_group(group)
        self.group = group
        self._row = {name: row for row, name in enumerate(names)}
        self._pairs = torch.zeros(len(names), 2, dtype=torch.float64, device=device)

    def add(self, name: str, sum: Tensor | float, count: Tensor | float = 1.0) -> None:
        """Add ``sum`` over ``count`` things (tokens, steps, ...) to metric ``name``."""
        if name not in self._row:
            raise ValueError(f"name={name!r} must be one of {list(self._row)}")
        for total, value in zip(self._pairs[self._row[name]], (sum, count), strict=True):
            if not isinstance(value, Tensor):
                total += value
            elif value.numel() == 1:
                total += value.detach().reshape(())
            else:
                raise ValueError(
                    f"{name}: a tensor of shape {list(value.shape)} must have one element"
                )

    def reduce(self) -> dict[str, Mean]:
        """Every metric over all ranks since the last call; one that counted nothing is left out."""
        pairs = self._whole()
        self._pairs.zero_()
        return {name: Mean(*pair) for name, pair in pairs.items() if any(pair)}

    def state_dict(self) -> dict[str, list[float]]:
        """The whole pending sums and counts: equal on every rank, and JSON."""
        return self._whole()

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take up pending sums at any number of ranks: the first holds them, the others zero.

        A metric that ``state`` does not name starts from zero.

        Raises:
            ValueError: ``state`` is no dict of sums and counts, or names another metric; nothing
                was changed.
        """
        check_state(state, ())
        if unknown := sorted(set(state) - set(self._row)):
            raise ValueError(f"state={unknown} must only name metrics of {list(self._row)}")
        for name, pair in state.items():
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise ValueError(f"state[{name!r}]={pair!r} must be a sum and a count")
        self._pairs.zero_()
        if self.group.rank == 0:
            for name, (sum, count) in state.items():
                self.add(name, sum, count)

    def _whole(self) -> dict[str, list[float]]:
        return dict(zip(self._row, self.group.all_reduce(self._pairs).tolist(), strict=True))
