"""One line on a terminal that says how far a tool is; nothing elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import TextIO

_BAR, _PAUSE = 20, 0.2


class Progress:
    """Shows how many of ``total`` bytes are done, how fast, and how long the rest may take.

    Writes to ``stream`` (stderr) if that is a terminal, at most five times a second. With ``unit``,
    such as "samples", it is these that are counted.
    """

    def __init__(
        self, what: str, total: int = 0, *, unit: str = "", stream: TextIO | None = None
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._stream = sys.stderr if stream is None else stream
        self._silent = not self._stream.isatty()
        self._done, self._width = 0, 0
        self._began = self._shown = time.monotonic()

    def add(self, nbytes: int) -> None:
        """So many more are done."""
        self.show(self._done + nbytes, self._total)

    def show(self, done: int, total: int) -> None:
        """So many are done, of so many."""
        self._done, self._total = done, total
        now = time.monotonic()
        if self._silent or now - self._shown < _PAUSE:
            return
        self._shown = now
        line = f"{self._what}  {progress_text(done, total, now - self._began, self._unit)}"
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def close(self) -> None:
        """Take the line away."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


def progress_text(done: int, total: int, seconds: float, unit: str = "") -> str:
    """A bar, the bytes done in so many seconds, their rate, and the time left at that rate.

    Or with ``unit`` what is done of these, without a rate.
    """
    filled = min(_BAR, _BAR * done // max(total, 1))
    bar = "#" * filled + "-" * (_BAR - filled)
    rate = done / max(seconds, 1e-9)
    left = f"  {time_text((total - done) / rate)} left" if 0 < done <= total else ""
    if unit:
        return f"{bar}  {done} of {total} {unit}{left}"
    return f"{bar}  {size_text(done)} of {size_text(total)}  {size_text(int(rate))}/s{left}"


def time_text(seconds: float) -> str:
    """Hours, minutes and seconds, rounded up."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def size_text(nbytes: int) -> str:
    """A number of bytes, short."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
