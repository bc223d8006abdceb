"""Metrics on disk: one JSON line a step, whole after a crash, appended to after a resume.

A line is ``{"step": 7, "time": 1760000000.1, "loss": [4721.5, 2048.0], ...}``: the step, the
clock (seconds since 1970), and each metric's exact sum and count. A sum that is not finite is
written as ``null``, which JSON can say, and read back as NaN.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megablocks_core.groups import LOCAL, Group, together
from megablocks_core.train.metrics import Mean


class Line(NamedTuple):
    """What one line says."""

    step: int
    time: float
    values: dict[str, Mean]


class JsonLines:
    """Writes a JSON line per call of ``write``, on rank 0 of ``group``; other ranks do nothing.

    ``step`` is the first step that will be written. The file may hold an earlier part of the
    same run: a line that a crash cut short is dropped, and so are the lines of steps from
    ``step`` on, which are about to run again (a step counted twice bends every curve). Each
    line is one system call, so a killed process leaves whole lines; a full disk raises and
    leaves them too. The file is locked against a second run until it is closed, or its process
    ends in whatever way.

    Sent: a few bytes here, so that an error on rank 0 raises on all.

    Raises:
        ValueError: Another run writes the file, a line before the last cannot be read, or
            ``write`` with a step that is not above the last one written.
    """

    def __init__(self, path: str | Path, *, step: int = 0, group: Group = LOCAL) -> None:
        self.path = Path(path)
        self.last_seen: float | None = None  # the clock of the last line found, dropped or not
        self.dropped = 0  # steps whose lines were found and are about to run again
        self._last_step = step - 1
        self._file: int | None = None
        with together(f"writing {self.path}", group=group, raises=OSError):
            if group.rank == 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
                self._lock(self._file)
                os.ftruncate(self._file, self._end_of_lines_before(step))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the line of ``step``; a plain float counts as a sum over one."""
        if taken := {"step", "time"} & set(values):
            raise ValueError(f"values must not be named {sorted(taken)}: every line has its own")
        if step <= self._last_step:
            raise ValueError(f"step={step} must be above {self._last_step}, the last one written")
        self._last_step = step
        if self._file is None:
            return
        data = _encode(Line(step, time.time(), {k: _as_mean(v) for k, v in values.items()}))
        end = os.lseek(self._file, 0, os.SEEK_END)
        written = os.write(self._file, data)
        if written < len(data):
            os.ftruncate(self._file, end)
            raise OSError(f"{self.path}: {written} of {len(data)} bytes written: is the disk full?")

    def close(self) -> None:
        """Close the file; ``write`` is no longer allowed."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lock(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ValueError(f"{self.path} is being written by another run") from None
        except OSError:
            pass  # some network file systems have no locks

    def _end_of_lines_before(self, step: int) -> int:
        end = offset = 0
        for line, offset in _lines(self.path):
            self.last_seen = line.time
            if line.step < step:
                end = offset
            else:
                self.dropped = line.step + 1 - step
        return end


def read_lines(path: str | Path) -> list[Line]:
    """Read the lines of a file that ``JsonLines`` wrote; one cut short at its end is left out.

    Raises:
        ValueError: A line before the last cannot be read; the message names file and line.
    """
    return [line for line, _ in _lines(Path(path))]


def finite(value: Any) -> Any:
    """``value`` with ``None`` for every number that JSON cannot say."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _lines(path: Path) -> Iterator[tuple[Line, int]]:
    """Each whole line with the offset of its end."""
    rows = path.read_bytes().splitlines(keepends=True)
    offset = 0
    for number, row in enumerate(rows, start=1):
        offset += len(row)
        try:
            line = _decode(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(rows):
                return
            raise ValueError(f"{path}, line {number}: not a line of metrics: {error}") from error
        if row.endswith(b"\n"):
            yield line, offset


def _encode(line: Line) -> bytes:
    pairs = {name: [finite(m.sum), m.count] for name, m in line.values.items()}
    row = {"step": line.step, "time": line.time, **pairs}
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _decode(row: bytes) -> Line:
    pairs = json.loads(row)
    step, time_ = int(pairs.pop("step")), float(pairs.pop("time"))
    values = {k: Mean(math.nan if s is None else s, count) for k, (s, count) in pairs.items()}
    return Line(step, time_, values)


def _as_mean(value: float) -> Mean:
    return value if isinstance(value, Mean) else Mean(float(value))
