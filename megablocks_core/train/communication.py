"""How long a rank waits for others: seen by torch's profiler, with nothing hooked into groups.

Waiting is the time in which a collective is under way and this rank computes nothing. A
collective hidden behind arithmetic costs nothing and counts nothing. On CPU the intervals are
those of gloo's work and of this thread's operators, on a GPU those of NCCL's and other kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

Interval = tuple[float, float]

_MARK = "communication sample"
_NO_ARITHMETIC = ("c10d::", "_c10d_functional::", "autograd::")


class CommunicationSample:
    """Watches this thread from ``start`` to ``stop``, which returns the seconds waited."""

    def start(self) -> None:
        """Begin to watch; costs about a millisecond, and some microseconds an operator."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        with _silent_profiler():
            self._profile.start()
        self._mark = torch.profiler.record_function(_MARK)
        self._mark.__enter__()

    def stop(self) -> float:
        """End, and return the seconds in which this rank only waited."""
        self._mark.__exit__(None, None, None)
        with _silent_profiler():
            self._profile.stop()
        communicating, computing = split_events(self._profile.events() or [])
        return seconds_exposed(communicating, computing)


def split_events(events: Iterable[FunctionEvent]) -> tuple[list[Interval], list[Interval]]:
    """Intervals in microseconds of communication, and of arithmetic by the watched thread."""
    events = list(events)
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    if on_device:
        network = [event for event in on_device if event.name.startswith("nccl")]
        arithmetic = [event for event in on_device if not event.name.startswith(("nccl", _MARK))]
    else:
        thread = next((event.thread for event in events if event.name == _MARK), None)
        network = [event for event in events if event.name.startswith("gloo:")]
        arithmetic = [
            event
            for event in events
            if event.thread == thread
            and "::" in event.name
            and not event.name.startswith(_NO_ARITHMETIC)
        ]
    return _intervals(network), _intervals(arithmetic)


def seconds_exposed(communicating: list[Interval], computing: list[Interval]) -> float:
    """Seconds within ``communicating`` and outside ``computing``, both in microseconds."""
    return (_covered(communicating + computing) - _covered(computing)) / 1e6


def _covered(intervals: list[Interval]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _intervals(events: Iterable[FunctionEvent]) -> list[Interval]:
    return [(event.time_range.start, event.time_range.end) for event in events]


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
