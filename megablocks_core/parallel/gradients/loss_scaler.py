"""A dynamic loss scale, so that gradients of float16 neither vanish nor overflow.

Micikevicius et al., https://arxiv.org/abs/1710.03740, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.groups.shares import gradient_parts
from megablocks_core.parallel.checks import (
    check_mapping,
    check_number,
    check_parameters,
    check_tensors,
    check_whole,
)
from megablocks_core.parallel.gradients.counts import all_finite
from megablocks_core.parallel.wrapping.agreement import check_agreed, words_of

_STATE = ("scale", "good_steps", "tolerated", "skipped")


class LossScaler:
    """Scales a loss, unscales its gradients, and says whether the step may be taken.

        scaler = LossScaler(group=world)
        ...
        scaler.scale(loss).backward()  # each micro-batch
        if scaler.unscale_(model):  # once, after the gradients were reduced
            clip_grad_norm_(model, 1.0)
            optimizer.step()
        optimizer.zero_grad()

    When an element of any gradient on any rank is not finite, the step is to be skipped, on all
    ranks alike. After ``hysteresis`` such steps since the scale last grew, each of them multiplies
    it by ``backoff_factor``; ``growth_interval`` sound steps in a row multiply it by
    ``growth_factor``, and hysteresis is whole again. ``train.FiniteGuard`` may stand beside it: it
    judges the norm and the loss, and ends a run that skips without end.

    Gradients are unscaled in place wherever they lie: whole, DTensors, or a sharded optimizer's
    ranges. Reading the answer waits for the device.

    Sent: as ``all_finite``; over ``group`` one number a step, and at construction words to
    compare the arguments.

    Args:
        initial: The first scale; powers of two leave every digit as it is.
        growth_factor: At least 1.
        backoff_factor: Above 0, at most 1.
        growth_interval: Sound steps before the scale grows.
        hysteresis: 1: the first unsound step lowers the scale.
        minimum: The scale does not fall below it.
        maximum: Nor grow above it.
        group: All ranks that step together.

    Raises:
        ValueError: An argument is out of range, or differs between ranks.
    """

    def __init__(
        self,
        *,
        initial: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        minimum: float = 1.0,
        maximum: float = 2.0**32,
        group: Group = LOCAL,
    ) -> None:
        check_group(group)
        _check_scale("minimum", minimum)
        _check_scale("maximum", maximum)
        check_number(
            "initial",
            initial,
            f"a number from minimum={minimum} to maximum={maximum}",
            lambda x: minimum <= x <= maximum,
        )
        check_number(
            "growth_factor", growth_factor, "at least 1, and finite", lambda x: 1 <= x < math.inf
        )
        check_number(
            "backoff_factor", backoff_factor, "above 0 and at most 1", lambda x: 0 < x <= 1
        )
        check_whole("growth_interval", growth_interval, least=1)
        check_whole("hysteresis", hysteresis, least=1)
        words = words_of(
            initial=float(initial),
            growth_factor=float(growth_factor),
            backoff_factor=float(backoff_factor),
            growth_interval=int(growth_interval),
            hysteresis=int(hysteresis),
            minimum=float(minimum),
            maximum=float(maximum),
        )
        check_agreed(words, groups=[group])
        self._factors = growth_factor, backoff_factor
        self._interval, self._hysteresis = growth_interval, hysteresis
        self._bounds = minimum, maximum
        self.group = group
        self._scale = float(initial)
        self._good_steps, self._tolerated, self._skipped = 0, hysteresis, 0

    @property
    def value(self) -> float:
        """The scale of the step to come."""
        return self._scale

    @property
    def skipped(self) -> int:
        """How many steps were skipped in all."""
        return self._skipped

    def scale(self, loss: Tensor) -> Tensor:
        """The loss that ``backward`` is called on; in float32 at least, as the scale is large."""
        check_tensors(loss=loss)
        wide = loss.float() if loss.dtype.itemsize < 4 else loss
        return wide * self._scale

    @torch.no_grad()
    def unscale_(self, module_or_parameters: nn.Module | Tensor | Iterable[Tensor]) -> bool:
        """Divide gradients by the scale, move the scale, and say whether the step may be taken.

        Call it once a step, on every rank of ``group``. Of a step that is to be skipped, the
        gradients are left as they are.
        """
        given = check_parameters(module_or_parameters)
        sound = bool(all_finite(given, group=self.group))
        if sound:
            parts = gradient_parts(given)
            held = [part.held for part in parts if part.held is not None and part.held.numel()]
            if held:
                torch._foreach_div_(held, self._scale)  # pyright: ignore[reportPrivateImportUsage]
        self._move(sound)
        return sound

    def state_dict(self) -> dict[str, Any]:
        """The scale and the counts: equal on every rank, and JSON."""
        return {name: getattr(self, f"_{name}") for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, at any number of ranks.

        Raises:
            ValueError: It lacks an entry, or one is out of range; nothing was changed.
        """
        check_mapping("state", state, _STATE)
        _check_scale("scale", state["scale"])
        for name in _STATE[1:]:
            check_whole(name, state[name], least=0)
        self._scale = float(state["scale"])
        self._good_steps, self._tolerated = int(state["good_steps"]), int(state["tolerated"])
        self._skipped = int(state["skipped"])

    def _move(self, sound: bool) -> None:
        (growth, backoff), (minimum, maximum) = self._factors, self._bounds
        if sound:
            self._good_steps += 1
            if self._good_steps == self._interval:
                self._good_steps, self._tolerated = 0, self._hysteresis
                self._scale = min(self._scale * growth, maximum)
            return
        self._skipped += 1
        self._good_steps = 0
        self._tolerated = max(self._tolerated - 1, 0)
        if self._tolerated == 0:
            self._scale = max(self._scale * backoff, minimum)


def _check_scale(name: str, value: object) -> None:
    check_number(name, value, "above 0, and finite", lambda x: 0 < x < math.inf)
