"""Threads of this process that encode units, for an engine that lets them run side by side.

They need no time to start, and what they make is not copied between processes. Between calls of the
engine and of the reader they wait for each other, so many of them gain nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import local
from typing import Any

from megablocks_core.data.tokenize.worker import Opens

_WINDOW = 4  # units a thread that are under way or wait for an earlier one


class Threads:
    """Encodes units on ``workers`` threads.

    Args:
        settings: Open an encoder in each.
        workers: How many.
    """

    def __init__(self, settings: Opens, workers: int) -> None:
        self._settings, self._own = settings, local()
        self._window = _WINDOW * workers
        self._pool = ThreadPoolExecutor(workers, "tokenize")

    def encode(self, units: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Each unit with what is written of it, in their order."""
        waiting: deque[tuple[Any, Future]] = deque()
        for unit in units:
            kept = unit._replace(data=b"") if hasattr(unit, "data") else unit
            waiting.append((kept, self._pool.submit(self._encode, unit)))
            while waiting and (len(waiting) == self._window or waiting[0][1].done()):
                yield _first(waiting)
        while waiting:
            yield _first(waiting)

    def close(self) -> None:
        """End all threads, after the units that they are at."""
        self._pool.shutdown(cancel_futures=True)

    def _encode(self, unit: Any) -> Any:
        if not hasattr(self._own, "encoder"):
            self._own.encoder = self._settings.open()
        return self._own.encoder.encode(unit)


def _first(waiting: deque[tuple[Any, Future]]) -> tuple[Any, Any]:
    unit, answer = waiting.popleft()
    return unit, answer.result()
