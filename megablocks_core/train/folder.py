"""A run's folder: metrics, record of every start, and summary, whole whatever happens.

``metrics.jsonl`` has a line a step (see ``lines``), ``record.json`` a list with one run record
per start and how that start ended, ``summary.json`` what was found out at the end, such as
``layout_distance`` (a number, or a dict of them by what was compared) and ``sample`` (text).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from megablocks_core.files import read_json, replace_file
from megablocks_core.groups import LOCAL, Group, check_group, together
from megablocks_core.train.failures import leave_failure, remove_failures, with_first_causes
from megablocks_core.train.lines import JsonLines, Line, finite, read_lines
from megablocks_core.train.metrics import Mean, pooled

METRICS, RECORD, SUMMARY = "metrics.jsonl", "record.json", "summary.json"
_AFTER = "after_the_last_line"
_FATE = ("step", "started", "ended", "error", "recovery_seconds")


class RunFolder:
    """Writes a run's folder on rank 0 of ``group``; the others write only how they failed.

        with RunFolder(out, record=run_record(), step=start, group=world) as run:
            for step in range(start, steps):
                ...
                run.write(step, {**metrics.reduce(), **timer.reduce()})

    ``step`` is the first step to come: 0, or where a checkpoint left off. A start in a folder
    that has lines continues that run: lines of ``step`` and beyond are dropped. Each start adds
    its record with ``step``, ``started``, ``ended``, ``error`` and ``repeated_steps`` (how many
    it does again, because lines of them were there); a start without ``ended`` was killed. After
    such a start, ``recovery_seconds`` is the time from the last line written before it to the
    first line written by the next. ``error`` is that of the rank that failed first, if the ranks
    share the folder (see ``failures``).

    Sent: a few bytes here, so that an error on rank 0 raises on all.

    Raises:
        ValueError: A file of the folder cannot be read; ``write`` goes back in steps.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        record: Mapping[str, Any],
        step: int = 0,
        group: Group = LOCAL,
    ) -> None:
        check_group(group)
        self.path = Path(path)
        self._rank, self._writes = group.rank, group.rank == 0
        self._last_step = step - 1
        self._lines = JsonLines(self.path / METRICS, step=step, group=group)
        self._starts: list[dict[str, Any]] = []
        with together(f"recording a start in {self.path}", group=group, raises=OSError):
            if self._writes:
                self._begin(record, step)
        self._number = group.broadcast_object(len(self._starts) - 1)

    def _begin(self, record: Mapping[str, Any], step: int) -> None:
        self._starts = _read_starts(self.path)
        broken_off = bool(self._starts) and not ended_well(self._starts[-1])
        self._recovers_from = self._lines.last_seen if broken_off else None
        now = time.time()
        fate = {"step": step, "started": now, "repeated_steps": self._lines.dropped}
        self._starts.append({**record, **dict.fromkeys(_FATE), **fate})
        self._save()
        remove_failures(self.path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the line of ``step`` (counted from 0, rising)."""
        self._lines.write(step, values)
        self._last_step = step
        if self._writes and self._recovers_from is not None:
            self._starts[-1]["recovery_seconds"] = time.time() - self._recovers_from
            self._recovers_from = None
            self._save()

    def add(self, values: Mapping[str, float]) -> None:
        """Keep what was measured after the last line, such as the seconds of a last checkpoint.

        It goes into the record and is read back as part of that line, pooled with what the line
        says of the same name. Called again, it replaces what it kept; when this start has written
        no line there is nothing to add to.
        """
        if self._writes:
            self._starts[-1][_AFTER] = {
                "step": self._last_step,
                "time": time.time(),
                "values": {name: _pair(value) for name, value in values.items()},
            }
            self._save()

    def close(self) -> None:
        """End this start, without an error; a ``with`` block does it and knows of errors."""
        self.__exit__(None, None, None)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lines.close()
        text = None if kind is None else f"{kind.__name__}: {error}"
        if self._writes:
            self._starts[-1].update(ended=time.time(), error=text)
            self._starts = with_first_causes(self._starts, self.path)
            self._save()
        elif text is not None:
            leave_failure(self.path, start=self._number, rank=self._rank, text=text)

    def _save(self) -> None:
        _write_json(self.path / RECORD, self._starts)


class Run(NamedTuple):
    """A run's folder as it was read."""

    path: Path
    lines: list[Line]
    starts: list[dict[str, Any]]
    summary: dict[str, Any]


def read_run(path: str | Path) -> Run:
    """Read the folder of a run.

    Raises:
        ValueError: It is no folder, has no metrics, or a file in it cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"run={path} must be a folder")
    if not (path / METRICS).exists():
        raise ValueError(f"run={path} must hold {METRICS}, which RunFolder writes")
    lines = read_lines(path / METRICS)
    if not lines:
        raise ValueError(f"{path / METRICS} must hold at least one whole line")
    starts, summary = _read_starts(path), _read_json(path / SUMMARY, missing={})
    added = {line.step: line.values for line in _added(starts)}
    lines = [line._replace(values=_joined(line.values, added.get(line.step, {}))) for line in lines]
    return Run(path, lines, starts, summary)


def add_to_summary(path: str | Path, values: Mapping[str, Any]) -> None:
    """Set ``values`` (JSON) in the summary of the run at ``path``; call it on one rank."""
    file = Path(path) / SUMMARY
    _write_json(file, {**_read_json(file, missing={}), **values})


def ended_well(start: Mapping[str, Any]) -> bool:
    """Whether a start of the record ran to its end without an error."""
    return start["ended"] is not None and start["error"] is None


def _pair(value: float) -> list[float]:
    return [value.sum, value.count] if isinstance(value, Mean) else [value, 1.0]


def _read_starts(folder: Path) -> list[dict[str, Any]]:
    starts = _read_json(folder / RECORD, missing=[])
    for start in starts:
        if not isinstance(start, dict) or not start.keys() >= set(_FATE):
            raise ValueError(f"{folder / RECORD}: each start must say {', '.join(_FATE)}")
    return with_first_causes(starts, folder)


def _added(starts: list[dict[str, Any]]) -> Iterator[Line]:
    """What starts added to a line of theirs that no later start took back."""
    firsts = [start["step"] for start in starts]
    for place, start in enumerate(starts):
        added = start.get(_AFTER)
        end = min(firsts[place + 1 :], default=math.inf)
        if added and start["step"] <= added["step"] < end:
            values = {
                name: Mean(math.nan if sum is None else sum, count)
                for name, (sum, count) in added["values"].items()
            }
            yield Line(added["step"], added["time"], values)


def _joined(first: dict[str, Mean], second: Mapping[str, Mean]) -> dict[str, Mean]:
    both = {name: pooled([first[name], second[name]]) for name in first.keys() & second.keys()}
    return {**first, **second, **both}


def _read_json(path: Path, *, missing: Any) -> Any:
    return read_json(path, type(missing)) if path.exists() else missing


def _write_json(path: Path, value: Any) -> None:
    replace_file(path, json.dumps(finite(value), indent=1, allow_nan=False).encode())
