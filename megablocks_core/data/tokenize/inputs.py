"""The files that are tokenised, in their order, and what format each has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from megablocks_core.data.checks import several

LINES, ROWS, TEXT = "lines", "rows", "text"
_LINE_ENDINGS = (".jsonl", ".ndjson")
_COMPRESSIONS = {".gz": "gz", ".zst": "zst"}


class Input(NamedTuple):
    """A file, as it was when the run began.

    Attributes:
        path: Absolute.
        size: In bytes.
        changed: Nanoseconds at which it was written to.
        format: ``LINES`` of JSON, ``ROWS`` of Parquet, or ``TEXT``, which is one document.
        compression: "gz", "zst" or none.
    """

    path: str
    size: int
    changed: int
    format: str
    compression: str


def find_inputs(
    paths: Iterable[str | os.PathLike[str]], suffixes: Sequence[str] = ()
) -> list[Input]:
    """The files named, and those below the folders named, sorted by path in each.

    Below a folder, names that begin with a dot are left out, and with ``suffixes`` all names
    that do not end in one of them.

    Raises:
        ValueError: There is no such file, or none at all.
    """
    given = list(several("inputs", paths))
    endings = tuple(several("suffixes", suffixes))
    if not all(isinstance(path, str | os.PathLike) for path in given):
        raise ValueError(f"inputs={given!r} must be paths of files and folders")
    if not all(isinstance(ending, str) for ending in endings):
        raise ValueError(f"suffixes={suffixes!r} must be ends of names, such as '.jsonl'")
    found = [inside for path in given for inside in _files_of(Path(path), endings)]
    if not found:
        raise ValueError(f"inputs={[str(path) for path in given]} must hold at least one file")
    return [_input(path) for path in found]


def refuse_changed(inputs: Iterable[Input]) -> None:
    """Raise ``ValueError`` if a file is not what it was when the run began."""
    for known in inputs:
        if not os.path.isfile(known.path) or _input(Path(known.path)) != known:
            raise ValueError(f"{known.path}: was changed while it was tokenised")


def _files_of(path: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(_below(path, endings))
    else:
        raise ValueError(f"input {str(path)!r} must be a file or folder that exists")


def _below(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    def fail(error: OSError) -> NoReturn:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place) / name
            if not name.startswith(".") and name.endswith(endings or ("",)) and path.is_file():
                yield path


def _input(path: Path) -> Input:
    at = path.stat()
    name = path.name.lower()
    compression = _COMPRESSIONS.get(path.suffix.lower(), "")
    stem = name.removesuffix(path.suffix.lower()) if compression else name
    if stem.endswith(_LINE_ENDINGS) or (compression and stem.endswith(".json")):
        kind = LINES
    else:
        kind = ROWS if name.endswith(".parquet") else TEXT
    return Input(os.path.abspath(path), at.st_size, at.st_mtime_ns, kind, compression)
