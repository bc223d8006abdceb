"""Schedules: pure functions from a run's position to a factor, for learning rates and the like.

A position is how much the run has consumed, in whatever unit the lengths are given in: tokens,
samples or steps. A schedule has no state, so a resumed run asks at its position and is right,
and a changed setting counts from the next step on. Hand in the position after a step's batch
(``Loader.consumed`` has it) and no step has the rate 0 at which a warm-up starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Schedule = Callable[[float], float]

_SHAPES = ("linear", "cosine", "exponential", "minus_sqrt")


@dataclass(frozen=True)
class Constant:
    """``factor`` everywhere; ``length`` only matters to the stage that follows."""

    factor: float = 1.0
    length: float = math.inf

    def __post_init__(self) -> None:
        _check_factor("factor", self.factor)
        _check_length(self.length, finite=False)

    def __call__(self, position: float) -> float:
        """Return the factor at ``position``."""
        _check_position(position)
        return self.factor


@dataclass(frozen=True)
class Ramp:
    """From ``start`` to ``end`` over ``length``, and ``end`` from there on.

    With ``t`` the share of ``length`` that is done, ``shape`` is how the way is covered:
    "linear" ``t``, "cosine" ``(1 - cos(pi t)) / 2``, "minus_sqrt" ``sqrt(t)`` (a decay from 1
    to 0 is ``1 - sqrt(t)``); "exponential" is ``start (end / start)^t``.

    Raises:
        ValueError: ``length`` is not positive and finite, a factor is negative (for
            "exponential": not positive), or ``shape`` is none of these.
    """

    length: float
    start: float = 0.0
    end: float = 1.0
    shape: str = "linear"

    def __post_init__(self) -> None:
        _check_length(self.length, finite=True)
        if self.shape not in _SHAPES:
            raise ValueError(f"shape={self.shape!r} must be one of {', '.join(_SHAPES)}")
        for name in ("start", "end"):
            _check_factor(name, getattr(self, name), positive=self.shape == "exponential")

    def __call__(self, position: float) -> float:
        """Return the factor at ``position``."""
        _check_position(position)
        if position >= self.length:
            return self.end
        t = position / self.length
        if self.shape == "exponential":
            return self.start * (self.end / self.start) ** t
        if self.shape == "cosine":
            t = (1 - math.cos(math.pi * t)) / 2
        elif self.shape == "minus_sqrt":
            t = math.sqrt(t)
        return self.start + (self.end - self.start) * t


@dataclass(frozen=True)
class InverseSquareRoot:
    """``sqrt(scale / (scale + position))``: 1 at first, and it never ends.

    Raises:
        ValueError: ``scale`` is not positive and finite.
    """

    scale: float
    length: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale={self.scale} must be positive and finite")
        _check_length(self.length, finite=False)

    def __call__(self, position: float) -> float:
        """Return the factor at ``position``."""
        _check_position(position)
        return math.sqrt(self.scale / (self.scale + position))


@dataclass(frozen=True)
class Stages:
    """One schedule after another, each asked from 0 on where the one before has ended.

    Each stage but the last needs a finite attribute ``length``; the last may be any callable.
    A position at which one stage ends belongs to the next.

    Raises:
        ValueError: No stage, or one before the last without a positive, finite length.
    """

    stages: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages=() must be one or more schedules")
        for stage in self.stages[:-1]:
            length = _length_of(stage)
            if not 0 < length < math.inf:
                raise ValueError(f"stage {stage} has length {length}, which must be finite")

    @property
    def length(self) -> float:
        """All lengths together."""
        return sum(map(_length_of, self.stages))

    def __call__(self, position: float) -> float:
        """Return the factor at ``position``."""
        _check_position(position)
        *before_last, last = self.stages
        for stage in before_last:
            if position < (length := _length_of(stage)):
                return stage(position)
            position -= length
        return last(position)


@dataclass(frozen=True)
class Product:
    """The product of what ``schedules`` say at one position, such as a warm-up and a decay.

    Raises:
        ValueError: No schedule.
    """

    schedules: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        if not self.schedules:
            raise ValueError("schedules=() must be one or more schedules")

    @property
    def length(self) -> float:
        """The longest length."""
        return max(map(_length_of, self.schedules))

    def __call__(self, position: float) -> float:
        """Return the factor at ``position``."""
        return math.prod(schedule(position) for schedule in self.schedules)


def constant_schedule(*, warmup: float = 0) -> Schedule:
    """Rise in a line from 0 to 1 over ``warmup``, then stay."""
    return _after_warmup(warmup, Constant())


def linear_schedule(length: float, *, warmup: float = 0, end: float = 0.0) -> Schedule:
    """Warm up, then fall in a line to ``end`` at ``length``."""
    return _after_warmup(warmup, _decay(length, warmup, end, "linear"))


def cosine_schedule(length: float, *, warmup: float = 0, end: float = 0.0) -> Schedule:
    """Warm up, then fall over half a cosine to ``end`` at ``length``."""
    return _after_warmup(warmup, _decay(length, warmup, end, "cosine"))


def inverse_square_root_schedule(*, warmup: float, scale: float | None = None) -> Schedule:
    """Warm up, then fall as ``sqrt(scale / (scale + position - warmup))``.

    ``scale`` is ``warmup`` unless given: the factor is then ``sqrt(warmup / position)``.
    """
    return _after_warmup(warmup, InverseSquareRoot(warmup if scale is None else scale))


def warmup_stable_decay_schedule(
    length: float, *, warmup: float, decay: float, shape: str = "linear", end: float = 0.0
) -> Schedule:
    """Warm up, stay at 1, and fall to ``end`` over the last ``decay`` of ``length``.

    ``shape`` is one of ``Ramp``'s. To go on from a checkpoint of the stable stage, ask with a
    larger ``length``: before the decay the factors are the same.

    Raises:
        ValueError: ``warmup`` and ``decay`` together exceed ``length``.
    """
    stable = length - warmup - decay
    if not stable >= 0:
        raise ValueError(f"warmup={warmup} and decay={decay} must fit into length={length}")
    stages: list[Schedule] = [Constant(length=stable)] if stable else []
    stages.append(Ramp(decay, start=1.0, end=end, shape=shape))
    return _after_warmup(warmup, *stages)


def _after_warmup(warmup: float, *stages: Schedule) -> Schedule:
    if not 0 <= warmup < math.inf:
        raise ValueError(f"warmup={warmup} must not be negative, and finite")
    stages = (Ramp(warmup), *stages) if warmup else stages
    return stages[0] if len(stages) == 1 else Stages(stages)


def _decay(length: float, warmup: float, end: float, shape: str) -> Ramp:
    if not length > warmup:
        raise ValueError(f"length={length} must be above warmup={warmup}")
    return Ramp(length - warmup, start=1.0, end=end, shape=shape)


def _length_of(schedule: Schedule) -> float:
    return getattr(schedule, "length", math.inf)


def _check_length(length: float, *, finite: bool) -> None:
    if not length > 0 or (finite and length == math.inf):
        raise ValueError(f"length={length} must be positive{' and finite' if finite else ''}")


def _check_factor(name: str, factor: float, *, positive: bool = False) -> None:
    if not 0 <= factor < math.inf or (positive and factor == 0):
        rule = "positive" if positive else "0 or more"
        raise ValueError(f"{name}={factor} must be {rule} and finite")


def _check_position(position: float) -> None:
    if not position >= 0:
        raise ValueError(f"position={position} must not be negative")
