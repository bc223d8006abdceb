"""Set an optimizer's learning rate, or another option, from a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megablocks_core.train.schedule import Schedule


class Scheduled:
    """Keeps ``option`` of every parameter group at its own base value times a schedule.

        rate = Scheduled(optimizer, cosine_schedule(total_tokens, warmup=total_tokens // 20))
        ...
        rate.set(consumed_tokens)      # before optimizer.step()

    The base values are those of the groups when this is made, so make it before a checkpoint is
    loaded: settings then come from the program and never from what an earlier run had reached.
    There is nothing to save. A learning rate kept as a tensor is changed in place, which
    compiled and captured optimizers see.

    Raises:
        ValueError: The optimizer has taken a step or was loaded, and no ``base`` is given; a
            group lacks ``option``; ``base`` has not one finite value a group; or
            ``schedule`` is no function, or its factor negative or not finite.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        option: str = "lr",
        base: Sequence[float] | None = None,
    ) -> None:
        if not callable(schedule):
            raise ValueError(f"schedule={schedule!r} must be a function of a position")
        groups = optimizer.param_groups
        if any(option not in group for group in groups):
            raise ValueError(f"option={option!r} must be one of {sorted(optimizer.defaults)}")
        if base is None and _was_stepped(optimizer):
            raise ValueError(
                "base=None must be one value a parameter group, because the optimizer has been "
                "stepped or loaded and its groups may no longer hold their base values"
            )
        if base is not None and len(base) != len(groups):
            raise ValueError(
                f"base={list(base)} must have a value for each of {len(groups)} groups"
            )
        self.optimizer, self.schedule, self.option = optimizer, schedule, option
        self.base = [
            float(value) for value in ([g[option] for g in groups] if base is None else base)
        ]
        if not all(map(math.isfinite, self.base)):
            raise ValueError(f"base={self.base} must be finite: the {option} of each group")

    def set(self, position: float) -> float:
        """Set every group for ``position``, and return the factor there."""
        factor = float(self.schedule(position))
        if not 0 <= factor < math.inf:
            raise ValueError(f"schedule({position})={factor} must be a finite factor of 0 or more")
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            if isinstance(current := group[self.option], Tensor):
                current.fill_(base * factor)
            else:
                group[self.option] = base * factor
        return factor


def _was_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has state that a step made; some have theirs from the start, with steps at 0."""
    counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    return any(int(count) > 0 for count in counts) if counts else bool(optimizer.state)
