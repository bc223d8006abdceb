"""Results computed on threads ahead of the one who asks, in order."""

import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Prefetch:
    """Calls ``make(number)`` on ``workers`` threads for up to ``ahead`` numbers that come next.

    An error of ``make`` is raised where its result is asked for, and asking again tries again. At
    most ``ahead`` results wait. When the object is dropped, calls that have not begun are
    cancelled and the threads end. A forked process starts threads of its own.
    """

    def __init__(self, make: Callable[[int], Any], *, workers: int, ahead: int) -> None:
        self._make, self._workers, self._ahead = make, workers, ahead
        self._start()

    def get(self, number: int, following: Callable[[int], int | None]) -> Any:
        """Return the result for a number; ``following`` tells which comes after another."""
        if self._process != os.getpid():  # threads do not outlive a fork
            self._start()
        if self._waiting and self._waiting[0][0] != number:
            self._cancel()
        last: int | None = self._waiting[-1][0] if self._waiting else None
        while len(self._waiting) < self._ahead:
            last = number if last is None else following(last)
            if last is None:
                break
            self._waiting.append((last, self._pool.submit(self._make, last)))
        try:
            result = self._waiting[0][1].result()
        except BaseException as error:
            # After Ctrl-C the result that is due is still made, and what has not begun is not.
            self._cancel(first=0 if isinstance(error, Exception) else 1)
            raise
        self._waiting.popleft()
        return result

    def _start(self) -> None:
        self._process = os.getpid()
        self._waiting: deque[tuple[int, Future[Any]]] = deque()
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="megablocks-data")
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def _cancel(self, first: int = 0) -> None:
        while len(self._waiting) > first:
            self._waiting.pop()[1].cancel()
