"""A calm line that says how far a run is: in place on a terminal, now and then in a file."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.train.metrics import Mean, pooled

_BAR = 24


class Progress:
    """Shows step, loss, tokens a second and the time left, on rank 0 of ``group``.

        step  120/400  ########----------------  loss 2.4113   18.3k tokens/s   1:52 left

    On a terminal one line is rewritten, at most five times a second; elsewhere a plain line is
    written every ``every`` seconds. ``start`` is the step a resumed run starts from. Writes to
    ``stream`` (stderr). Tokens a second are those since the line before.

    Raises:
        ValueError: ``total`` is not positive.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        every: float = 10.0,
        stream: TextIO | None = None,
        group: Group = LOCAL,
    ) -> None:
        check_group(group)
        if total < 1:
            raise ValueError(f"total={total} must be a positive number of steps")
        self.total, self.start = total, start
        self._stream = sys.stderr if stream is None else stream
        self._in_place = self._stream.isatty()
        self._pause = 0.2 if self._in_place else every
        self._silent = group.rank != 0
        self._began = time.monotonic()
        self._shown = -math.inf
        self._width = 0
        self._rates: list[Mean] = []

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Step ``step`` (counted from 0) is done; show it if it is time to."""
        if self._silent:
            return
        now = time.monotonic()
        done = step + 1
        if isinstance(rate := values.get("tokens_per_second"), Mean):
            self._rates.append(rate)
        if now - self._shown < self._pause and done < self.total:
            return
        self._shown = now
        if self._rates:
            values = {**values, "tokens_per_second": pooled(self._rates)}
            self._rates.clear()
        line = "  ".join(self._words(done, now - self._began, values))
        if self._in_place:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the line standing and move below it."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0

    def _words(self, done: int, seconds: float, values: Mapping[str, float]) -> list[str]:
        filled = min(_BAR, _BAR * done // self.total)
        words = [f"step {done:>{len(str(self.total))}}/{self.total}"]
        words.append("#" * filled + "-" * (_BAR - filled))
        if "loss" in values:
            words.append(f"loss {values['loss']:.4f}")
        if "tokens_per_second" in values:
            words.append(f"{_short(values['tokens_per_second'])} tokens/s")
        if done >= self.total:
            words.append(f"in {_clock(seconds)}")
        elif done > self.start:
            words.append(f"{_clock(seconds / (done - self.start) * (self.total - done))} left")
        return words


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
