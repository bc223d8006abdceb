"""One step that all ranks of a group take, and that fails on all of them or on none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megablocks_core.groups.group import Group, check_group

# What ends a program from outside, and may be raised anywhere.
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def together(
    task: str,
    *,
    group: Group,
    raises: type[Exception] = RuntimeError,
    interruptible: bool = True,
) -> Iterator[None]:
    """Run the body on every rank; if it raises on one rank, raise on every rank.

    A rank whose body raised gets its own exception, ``KeyboardInterrupt`` and ``SystemExit`` too;
    the others get a ``ValueError`` if it was one, else ``raises``, which names the task, the first
    rank that failed and its error. So no rank waits for one that gave up. Ctrl-C is raised in the
    body, or once the ranks have agreed. The body must not communicate. One small message (every
    rank's outcome) at the end.

    Args:
        task: What to call the work in an error.
        group: All ranks that take the step.
        raises: What a rank raises if another one failed.
        interruptible: False for a body that must not be left half done, or whose work is done by
            one rank for all: Ctrl-C on any waits for the end.

    Raises:
        RuntimeError: A rank does not answer, for it is gone.
    """
    check_group(group)
    mine: BaseException | None = None
    with _held(group) as interrupts:
        try:
            if interruptible:
                interrupts.let_through()
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            mine = error
        interrupts.hold()
        outcomes = _agreed(task, mine, group)
        if mine is not None:
            raise mine
    for rank, outcome in zip(group.ranks, outcomes, strict=True):
        if outcome is not None:
            is_value_error, text = outcome
            kind = ValueError if is_value_error else raises
            raise kind(f"{task} failed on rank {rank}: {text}")


@contextmanager
def interrupts_held(*, group: Group) -> Iterator[None]:
    """Let Ctrl-C wait, inside, for the next body of ``together``, or for the end.

    For a part of several steps that communicates between them: a rank that left there would keep
    the others waiting.
    """
    check_group(group)
    with _held(group):
        yield


class _Interrupts:
    """Stands in for the handlers of signals that end a program, and notes what came.

    Args:
        numbers: The signals; those without a handler in Python are left alone.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._before: dict[int, Any] = {}
        self._came: list[tuple[int, FrameType | None]] = []
        self._holds = True
        for number in numbers:
            if callable(handler := signal.getsignal(number)):
                self._before[number] = handler
                signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))
        if not self._holds:
            self._call()

    def let_through(self) -> None:
        """From now on what comes is handled at once, and now what came before."""
        self._holds = False
        self._call()

    def hold(self) -> None:
        """From now on what comes is noted."""
        self._holds = True

    def end(self) -> None:
        """Give the signals back to their handlers, and call these for what came."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._call()

    def _call(self) -> None:
        while self._came:
            number, frame = self._came.pop(0)
            self._before[number](number, frame)


@contextmanager
def _held(group: Group) -> Iterator[_Interrupts]:
    """Interrupts are held inside, by what holds them already if there is one.

    Not over a group of one, and outside the main thread there are none.
    """
    alone = group.size == 1 or threading.current_thread() is not threading.main_thread()
    for number in () if alone else _INTERRUPTS:
        if isinstance(outer := signal.getsignal(number), _Interrupts):
            yield outer
            return
    interrupts = _Interrupts(() if alone else _INTERRUPTS)
    try:
        yield interrupts
    finally:
        interrupts.end()


def _agreed(task: str, mine: BaseException | None, group: Group) -> list[tuple[bool, str] | None]:
    """What every rank says of its body: nothing, or if it was a ``ValueError``, and its text."""
    told = None
    if mine is not None:
        text = f"{type(mine).__name__}: {mine}".removesuffix(": ")
        told = (isinstance(mine, ValueError), text)
    try:
        return group.all_gather_object(told)
    except RuntimeError as error:
        if mine is not None:
            raise mine from error
        raise RuntimeError(
            f"{task}: not all of ranks {list(group.ranks)} answer: {error}"
        ) from error
