"""The work in units that the inputs alone decide, so that workers and restarts change nothing.

A file's bytes are hashed in pieces of ``unit_bytes``, in the order of units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megablocks_core.data.packages import package
from megablocks_core.data.tokenize.compressed import runs_of_lines
from megablocks_core.data.tokenize.inputs import LINES, ROWS, Input


class Texts(NamedTuple):
    """Whole files, each one document: ``files`` are numbers of inputs, ``paths`` their names."""

    files: tuple[int, ...]
    paths: tuple[str, ...]
    compressions: tuple[str, ...]
    piece: int
    nbytes: int


class Lines(NamedTuple):
    """The lines of a file that begin in the bytes [start, stop)."""

    files: tuple[int]
    path: str
    start: int
    stop: int
    nbytes: int


class Held(NamedTuple):
    """Lines that were decompressed, and why no more follow (``fault``), if that is one."""

    files: tuple[int]
    path: str
    first: bool
    data: bytes
    pieces: bytes
    fault: str
    nbytes: int


class Rows(NamedTuple):
    """Rows [start, stop) of a row group of a Parquet file, and bytes of it to hash.

    A group is cut every ``step`` rows. With a ``fault`` there are none.
    """

    files: tuple[int]
    path: str
    group: int
    start: int
    stop: int
    step: int
    hashed: tuple[int, int]
    piece: int
    fault: str
    nbytes: int


Unit = Texts | Lines | Held | Rows


def plan(
    inputs: Sequence[Input], *, key: str, unit_bytes: int, max_bytes: int, done: int = 0
) -> Iterator[Unit]:
    """The units of all files, in order, without the first ``done``."""
    units = _all_units(inputs, key, unit_bytes, max_bytes)
    for number, unit in enumerate(units):
        if number >= done:
            yield unit


def _all_units(
    inputs: Sequence[Input], key: str, unit_bytes: int, max_bytes: int
) -> Iterator[Unit]:
    small: list[int] = []
    for number, given in enumerate(inputs):
        is_text = given.format not in (LINES, ROWS)
        if small and (not is_text or _size(inputs, small) + given.size > unit_bytes):
            yield _texts(inputs, small, unit_bytes)
            small = []
        if is_text:
            small.append(number)
        elif given.format == ROWS:
            yield from _row_units(number, given, key, unit_bytes)
        elif given.compression:
            yield from _held_units(number, given, unit_bytes, max_bytes)
        else:
            for start in range(0, given.size, unit_bytes):
                stop = min(start + unit_bytes, given.size)
                yield Lines((number,), given.path, start, stop, stop - start)
    if small:
        yield _texts(inputs, small, unit_bytes)


def _size(inputs: Sequence[Input], numbers: Sequence[int]) -> int:
    return sum(inputs[number].size for number in numbers)


def _texts(inputs: Sequence[Input], numbers: Sequence[int], piece: int) -> Texts:
    files = [inputs[number] for number in numbers]
    return Texts(
        tuple(numbers),
        tuple(file.path for file in files),
        tuple(file.compression for file in files),
        piece,
        sum(file.size for file in files),
    )


def _held_units(number: int, given: Input, unit_bytes: int, max_bytes: int) -> Iterator[Held]:
    runs = runs_of_lines(given.path, given.compression, unit_bytes=unit_bytes, max_bytes=max_bytes)
    for index, run in enumerate(runs):
        yield Held((number,), given.path, index == 0, run.data, run.pieces, run.fault, run.nbytes)


def _row_units(number: int, given: Input, key: str, unit_bytes: int) -> Iterator[Rows]:
    ranges, fault = _row_ranges(given.path, key, unit_bytes)
    pieces = -(-given.size // unit_bytes)
    for index, (group, start, stop, step) in enumerate(ranges):
        low, high = (pieces * at // len(ranges) for at in (index, index + 1))
        end = min(high * unit_bytes, given.size)
        nbytes = max(0, end - low * unit_bytes)
        hashed = (low * unit_bytes, low * unit_bytes + nbytes)
        yield Rows(
            (number,), given.path, group, start, stop, step, hashed, unit_bytes, fault, nbytes
        )


def _row_ranges(
    path: str, key: str, unit_bytes: int
) -> tuple[list[tuple[int, int, int, int]], str]:
    """(group, start, stop, step) of about ``unit_bytes`` of text each, or why there are none."""
    parquet, arrow = open_parquet()
    nothing = [(0, 0, 0, 1)]
    try:
        with parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            if schema.get_field_index(key) < 0:
                return nothing, f"has no column {key!r}"
            if not _is_text(arrow, schema.field(key).type):
                return nothing, f"has no text in column {key!r}"
            ranges = []
            for group in range(metadata.num_row_groups):
                rows = metadata.row_group(group).num_rows
                step = max(1, rows * unit_bytes // max(1, _column_bytes(metadata, group, key)))
                ranges += [(group, at, min(at + step, rows), step) for at in range(0, rows, step)]
            return ranges or nothing, ""
    except (arrow.ArrowException, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system
        return nothing, "is no Parquet file that can be read"


def open_parquet() -> tuple[Any, Any]:
    """``pyarrow.parquet`` and ``pyarrow``."""
    what = "a Parquet file"
    return package("pyarrow.parquet", what=what), package("pyarrow", what=what)


def _is_text(arrow: Any, kind: Any) -> bool:
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    checks = ("is_string", "is_large_string", "is_string_view")
    return any(getattr(arrow.types, check)(kind) for check in checks)


def _column_bytes(metadata: Any, group: int, key: str) -> int:
    row_group = metadata.row_group(group)
    columns = map(row_group.column, range(row_group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == key)
