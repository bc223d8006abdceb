"""What each rank of a run fell over, so that its record names the first cause.

A rank that fails takes the others with it: they wait for its message and fail later, rank 0 as
well, which keeps the record. So every other rank leaves a file in the run's folder when it fails,
``failed.START.rank.RANK.json``, and whoever reads the record looks at them too. Which came first
is told by the hosts' clocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megablocks_core.files import read_json, replace_file


class _Failure(NamedTuple):
    time: float
    text: str


def leave_failure(folder: Path, *, start: int, rank: int, text: str) -> None:
    """Leave a file that says how ``rank`` failed; a disk that refuses hides no error."""
    failure = {"time": time.time(), "rank": rank, "error": text}
    with suppress(OSError):
        replace_file(folder / f"failed.{start}.rank.{rank}.json", json.dumps(failure).encode())


def with_first_causes(starts: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The starts of a record, each with the error of the rank that failed first."""
    return [
        {**start, "error": _first_cause(start, list(_failures(folder, number)))}
        for number, start in enumerate(starts)
    ]


def remove_failures(folder: Path) -> None:
    """Delete the files, because the record says it all."""
    for path in folder.glob("failed.*.rank.*.json"):
        with suppress(OSError):
            path.unlink()


def _first_cause(start: Mapping[str, Any], others: list[_Failure]) -> str | None:
    own = start["error"]
    if own is not None:
        others = [each for each in others if each.time < start["ended"] and own not in each.text]
    return min(others).text if others else own


def _failures(folder: Path, start: int) -> Iterator[_Failure]:
    for path in folder.glob(f"failed.{start}.rank.*.json"):
        with suppress(OSError, ValueError, KeyError):
            told = read_json(path, dict)
            yield _Failure(told["time"], f"rank {told['rank']}: {told['error']}")
