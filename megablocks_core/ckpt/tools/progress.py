"""One line on a terminal that says how far a tool is; nothing elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_BAR, _PAUSE = 24, 0.2


class Progress:
    """Shows how many of ``total`` bytes are done, at most five times a second.

    Writes to ``stream`` (stderr) if that is a terminal.
    """

    def __init__(self, what: str, total: int, *, stream: TextIO | None = None) -> None:
        self._what, self._total = what, total
        self._stream = sys.stderr if stream is None else stream
        self._silent = not self._stream.isatty()
        self._done, self._width = 0, 0
        self._shown = time.monotonic()

    def add(self, nbytes: int) -> None:
        """So many more are done."""
        self._done += nbytes
        now = time.monotonic()
        if self._silent or now - self._shown < _PAUSE:
            return
        self._shown = now
        filled = min(_BAR, _BAR * self._done // max(self._total, 1))
        bar = "#" * filled + "-" * (_BAR - filled)
        line = f"{self._what}  {bar}  {size_text(self._done)} of {size_text(self._total)}"
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def close(self) -> None:
        """Take the line away."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


def size_text(nbytes: int) -> str:
    """A number of bytes, short."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
