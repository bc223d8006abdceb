"""Stop on a signal or after a time, with all ranks leaving after the same step."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from megablocks_core.groups import LOCAL, Group, check_group

_NOT_YET, _MINUTES = 0, 1
_SIGNALS = 2  # and the number of the signal


class StopAfter:
    """Says after a step whether the run is to stop there, the same on all ranks.

        with StopAfter(minutes=230, group=world) as stop:
            for step in range(first, last):
                ...
                if stop():
                    save(...)
                    break

    It stops once any rank has received one of ``signals`` inside the block, or ``minutes``
    after this was made. The first signal only leaves its mark; from then on it has the handler
    it had before, so a second one acts at once. On leaving the block every handler is as it
    was, and a signal that came too late for any call to say so is raised again, not swallowed.
    Calls after the first ``True`` stay ``True``.

    ``every`` asks the other ranks on every so many calls only. Python runs handlers between
    operations of the main thread, so a rank that waits in a collective reacts after it.

    Sent: one all-reduce of 8 bytes over ``group``, all ranks, on every ``every``-th call.
    ``device`` is where the message lies (NCCL).

    Raises:
        ValueError: ``minutes`` is negative, ``every`` is below 1 or not whole, or the block is
            entered with a signal that cannot be handled, or outside the main thread with
            ``signals``, which Python delivers to that one alone. Handlers stay as they were.
    """

    def __init__(
        self,
        *,
        minutes: float | None = None,
        signals: Sequence[int] = (signal.SIGTERM,),
        every: int = 1,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
    ) -> None:
        check_group(group)
        if minutes is not None and not minutes >= 0:
            raise ValueError(f"minutes={minutes} must not be negative")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every} must be a whole number of at least 1 call")
        self.minutes, self.signals, self.every = minutes, tuple(dict.fromkeys(signals)), every
        self.group, self.device = group, device
        self.reason: str | None = None
        self._ends = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._received: int | None = None
        self._before: dict[int, Any] = {}
        self._calls = 0

    def __call__(self) -> bool:
        """Whether to stop here; every rank of ``group`` must call it as often.

        ``reason`` then says why, such as "SIGTERM" or "minutes=230".
        """
        if self.reason is not None:
            return True
        self._calls += 1
        if self._calls % self.every:
            return False
        own = torch.tensor([self._own_reason()], dtype=torch.int64, device=self.device)
        reason = int(self.group.all_reduce(own, "max"))
        if reason == _MINUTES:
            self.reason = f"minutes={self.minutes}"
        elif reason != _NOT_YET:
            self.reason = signal.Signals(reason - _SIGNALS).name
        return self.reason is not None

    def __enter__(self) -> StopAfter:
        if self.signals and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"signals={self.signals} must be () outside the main thread, which alone "
                "receives signals in Python"
            )
        for number in self.signals:
            try:
                self._before[number] = signal.signal(number, self._receive)
            except (OSError, ValueError, TypeError) as error:
                for known in list(self._before):
                    self._restore(known)
                raise ValueError(
                    f"signals={self.signals} must be signals that a program may handle, which "
                    f"{number!r} is not"
                ) from error
        return self

    def __exit__(self, *outcome: object) -> None:
        for number in list(self._before):
            self._restore(number)
        received, self._received = self._received, None
        if received is not None and self.reason is None:
            signal.raise_signal(received)

    def _own_reason(self) -> int:
        if self._received is not None:
            return _SIGNALS + self._received
        return _MINUTES if time.monotonic() >= self._ends else _NOT_YET

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self._restore(number)

    def _restore(self, number: int) -> None:
        if number in self._before:
            before = self._before.pop(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)
