"""How long a rank waits for others: seen by torch's profiler, with nothing hooked into groups.

Waiting is the time in which a collective is under way and this rank computes nothing. A
collective hidden behind arithmetic costs nothing and counts nothing. On CPU the intervals are
those of gloo's work and of this thread's operators, on a GPU those of NCCL's and other kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile, record_function

Interval = tuple[int, int]

_MARK = "communication sample"
_NO_ARITHMETIC = ("c10d::", "_c10d_functional::", "autograd::")


class Event(NamedTuple):
    """What the profiler saw from ``start`` to ``end``, in nanoseconds."""

    name: str
    start: int
    end: int
    thread: int
    on_device: bool


class Seen(NamedTuple):
    """What a sample saw.

    Attributes:
        waited: Seconds in which a collective was under way and this rank computed nothing.
        busy: Seconds in which the accelerator ran kernels that compute; ``None`` without one.
    """

    waited: float
    busy: float | None


class CommunicationSample:
    """Watches this thread, and the accelerator if there is one, from ``start`` to ``stop``."""

    def start(self) -> None:
        """Begin to watch; costs about a millisecond, and some microseconds an operator."""
        self._profile = profile(use_device="cuda" if torch.cuda.is_available() else None)
        with _silent_profiler():
            self._profile.__enter__()
        self._mark = record_function(_MARK)
        self._mark.__enter__()

    def stop(self) -> Seen:
        """End, and return what was seen."""
        self._mark.__exit__(None, None, None)
        with _silent_profiler():
            self._profile.__exit__(None, None, None)
        # The raw events: the profiler's own list of them takes 20 times as long to build.
        seen = self._profile.kineto_results
        assert seen is not None
        events = [
            Event(
                e.name(),
                e.start_ns(),
                e.end_ns(),
                e.start_thread_id(),
                e.device_type() != DeviceType.CPU,
            )
            for e in seen.events()
        ]
        return what_was_seen(events)


def what_was_seen(events: Sequence[Event]) -> Seen:
    """Seconds waited, and those in which a device computed."""
    communicating, computing = split_events(events)
    on_device = any(event.on_device for event in events)
    waited = seconds_exposed(communicating, computing)
    return Seen(waited, _covered(computing) / 1e9 if on_device else None)


def split_events(events: Sequence[Event]) -> tuple[list[Interval], list[Interval]]:
    """Intervals of communication, and of arithmetic by the watched thread or the device."""
    if on_device := [event for event in events if event.on_device]:
        network = [event for event in on_device if event.name.startswith("nccl")]
        arithmetic = [event for event in on_device if not event.name.startswith(("nccl", _MARK))]
    else:
        thread = next((event.thread for event in events if event.name == _MARK), None)
        network = [event for event in events if event.name.startswith("gloo:")]
        arithmetic = [e for e in events if e.thread == thread and _computes(e.name)]
    return [(e.start, e.end) for e in network], [(e.start, e.end) for e in arithmetic]


def seconds_exposed(communicating: list[Interval], computing: list[Interval]) -> float:
    """Seconds within ``communicating`` and outside ``computing``, both in nanoseconds."""
    return (_covered(communicating + computing) - _covered(computing)) / 1e9


def _covered(intervals: list[Interval]) -> int:
    """Length of the union."""
    total, reached = 0, -1
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _computes(operator: str) -> bool:
    return "::" in operator and not operator.startswith(_NO_ARITHMETIC)


@contextmanager
def _silent_profiler() -> Iterator[None]:
    """Keep the lines that the profiler's C++ writes to the error stream off the terminal."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
