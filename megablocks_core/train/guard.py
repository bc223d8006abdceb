"""Guards: one answer, the same on all ranks, to whether a step is sound enough to be taken.

A guard is asked after backward and clipping, before ``optimizer.step()``. When it says no and the
loop skips the step, this moves and that stays, on all ranks alike:

* weights and the optimizer's state stay, and so do masters and moments: nothing was stepped;
* the data moves on: the batch is left out, not tried again;
* a schedule of consumed tokens or samples moves on with the data;
* gradients are the loop's: ``optimizer.zero_grad()`` drops them either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.train.metrics import check_state
from megablocks_core.train.spikes import usual

Value = float | Tensor | tuple[float | Tensor, float | Tensor]

_POLICIES = ("skip", "raise")


class FiniteGuard:
    """Says whether every value is finite on every rank.

        guard = FiniteGuard()
        ...
        norm = clip_grad_norm_(model, 1.0)
        if guard({"grad_norm": norm}):
            optimizer.step()
        optimizer.zero_grad()

    Over ``LOCAL`` nothing is sent, and ranks agree all the same if the values are the same on
    all of them: so is the norm that ``clip_grad_norm_`` gives after the gradients were reduced,
    and one NaN or infinity in any gradient of any rank makes it not finite. Values that differ,
    such as this rank's loss, need ``group``, all ranks that step together.

    ``policy`` "skip" returns ``False``, "raise" raises. More than ``patience`` steps skipped
    in a row raise in any case: by then it is not the data. Reading the values waits for the
    device.

    Sent: 8 bytes a value over ``group``; before an error also who had what.

    Raises:
        ValueError: ``policy`` is neither, or ``patience`` is negative.
        FloatingPointError: A step that is to raise; on all ranks, with values and ranks named.
    """

    def __init__(self, *, policy: str = "skip", patience: int = 10, group: Group = LOCAL) -> None:
        check_group(group)
        self.group = group
        self._policy = _Policy(policy, patience)

    @property
    def skipped(self) -> int:
        """How many steps were skipped in all."""
        return self._policy.skipped

    def __call__(self, values: Mapping[str, float | Tensor]) -> bool:
        """Whether the step may be taken; every rank of ``group`` must ask, with equal names."""
        mine = _row(values.values())
        unsound = [not math.isfinite(value) for value in self.group.all_reduce(mine).tolist()]
        if not any(unsound):
            return self._policy.passed()
        return self._policy.failed(lambda: FloatingPointError(self._problem(list(values), mine)))

    def state_dict(self) -> dict[str, int]:
        """Counts of skipped steps: equal on every rank, and JSON."""
        return self._policy.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting from ``state``.

        Raises:
            ValueError: It lacks a count; nothing was changed.
        """
        self._policy.load_state_dict(state)

    def _problem(self, names: list[str], mine: Tensor) -> str:
        found = [
            f"{name}={value} on rank {rank}"
            for rank, row in zip(self.group.ranks, self.group.all_gather(mine), strict=True)
            for name, value in zip(names, row.tolist(), strict=True)
            if not math.isfinite(value)
        ]
        return f"must be finite: {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}"


class SpikeGuard:
    """Says whether no value stands far above its own recent past.

        guard = SpikeGuard(group=mesh.group("dp", "cp"))
        ...
        if guard({"loss": (loss_sum, num_tokens), "grad_norm": norm}):
            optimizer.step()

    A value is a number, or a sum and a count; over ``group`` sums and counts are added, and the
    mean of all ranks is judged, so every rank gives the same answer. Over ``LOCAL`` nothing is
    sent and the values must be the same everywhere.

    Far is more than ``threshold`` spreads above the median of the last ``window`` values of
    steps that were taken. A spread is 1.4826 median absolute deviations, a standard deviation of
    normal noise, and at least 1% of the median: the rule by which reports ring values. Nothing
    is judged before ``window // 2`` values. A value that is not finite never passes. A skipped
    value does not enter the window.

    ``policy`` and ``patience`` are those of ``FiniteGuard``: with a level that has moved for
    good, patience ends.

    Sent: 16 bytes a value over ``group``.

    Raises:
        ValueError: ``window`` is below 4, ``threshold`` is not positive, or as ``FiniteGuard``.
        ArithmeticError: A step that is to raise, with the value and what it was held against.
    """

    def __init__(
        self,
        *,
        window: int = 128,
        threshold: float = 6.0,
        policy: str = "skip",
        patience: int = 10,
        group: Group = LOCAL,
    ) -> None:
        check_group(group)
        if not isinstance(window, int) or window < 4:
            raise ValueError(f"window={window} must be a whole number of at least 4 steps")
        if not threshold > 0:
            raise ValueError(f"threshold={threshold} must be positive")
        self.window, self.threshold, self.group = window, threshold, group
        self._policy = _Policy(policy, patience)
        self._past: dict[str, list[float]] = {}

    @property
    def skipped(self) -> int:
        """How many steps were skipped in all."""
        return self._policy.skipped

    def __call__(self, values: Mapping[str, Value]) -> bool:
        """Whether the step may be taken; every rank of ``group`` must ask, with equal names."""
        pairs = [value if isinstance(value, tuple) else (value, 1.0) for value in values.values()]
        total = self.group.all_reduce(_row(part for pair in pairs for part in pair))
        means = [s / n if n else math.nan for s, n in total.view(-1, 2).tolist()]
        problems = [
            problem
            for name, mean in zip(values, means, strict=True)
            if (problem := self._problem(name, mean))
        ]
        if problems:
            return self._policy.failed(lambda: ArithmeticError("; ".join(problems)))
        for name, mean in zip(values, means, strict=True):
            self._past[name] = [*self._past.get(name, ()), mean][-self.window :]
        return self._policy.passed()

    def state_dict(self) -> dict[str, Any]:
        """The window and the counts: equal on every rank, and JSON."""
        past = {name: list(values) for name, values in self._past.items()}
        return {**self._policy.state_dict(), "past": past}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, at any number of ranks.

        Raises:
            ValueError: It lacks a count or the window; nothing was changed.
        """
        check_state(state, ("past",))
        check_state(state["past"], ())
        past = {name: list(values)[-self.window :] for name, values in state["past"].items()}
        self._policy.load_state_dict(state)
        self._past = past

    def _problem(self, name: str, value: float) -> str | None:
        if not math.isfinite(value):
            return f"{name}={value} must be finite"
        past = self._past.get(name, [])
        if len(past) < self.window // 2:
            return None
        median, most = usual(past, threshold=self.threshold)
        if value <= most:
            return None
        return f"{name}={value:.6g} must not be above {most:.6g}, after a median of {median:.6g}"


class _Policy:
    """Skip or raise, and the patience of both guards."""

    def __init__(self, policy: str, patience: int) -> None:
        if policy not in _POLICIES:
            raise ValueError(f"policy={policy!r} must be one of {', '.join(_POLICIES)}")
        if not patience >= 0:
            raise ValueError(f"patience={patience} must not be negative")
        self.raises, self.patience = policy == "raise", patience
        self.skipped = self.in_a_row = 0

    def passed(self) -> bool:
        self.in_a_row = 0
        return True

    def failed(self, error: Callable[[], ArithmeticError]) -> bool:
        self.skipped += 1
        self.in_a_row += 1
        if self.raises:
            raise error()
        if self.in_a_row > self.patience:
            problem = error()
            raise type(problem)(f"{self.in_a_row} steps in a row: {problem}")
        return False

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, ("skipped", "in_a_row"))
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])


def _row(values: Iterable[float | Tensor]) -> Tensor:
    """Numbers and tensors of one element as one float64 vector, where the tensors are."""
    values = list(values)
    if not values:
        raise ValueError("values={} must hold a value to judge")
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    parts = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    return torch.stack([part.detach().reshape(()) for part in parts])
