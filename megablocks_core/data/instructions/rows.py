"""The rows of instruction data, in blocks that the inputs alone decide.

``.jsonl`` and ``.ndjson`` hold a row a line, also with ``.gz`` or ``.zst`` after it; ``.parquet``
is a table of rows, and ``.json`` a list of them, which is read whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megablocks_core.data.tokenize.compressed import runs_of_lines
from megablocks_core.data.tokenize.inputs import LINES, ROWS, Input
from megablocks_core.data.tokenize.reading import BOM, Bad
from megablocks_core.data.tokenize.units import open_parquet

_STEP = 1 << 20
_ROWS = 256  # of a table at a time


class Block(NamedTuple):
    """Some rows of a file.

    Attributes:
        path: Of the file.
        file: Its number among the inputs.
        first: Number of the first row, from 1.
        data: Lines of JSON, or values.
        fault: Why no more rows follow, if that is a fault.
        nbytes: Of the file, about.
    """

    path: str
    file: int
    first: int
    data: bytes | list[Any]
    fault: str
    nbytes: int


def blocks(inputs: Sequence[Input], *, block_bytes: int, max_bytes: int) -> Iterator[Block]:
    """The blocks of all files, in order.

    Raises:
        ValueError: A file is of no format that has rows.
    """
    for number, given in enumerate(inputs):
        if given.format == LINES:
            yield from _line_blocks(number, given, block_bytes, max_bytes)
        elif given.format == ROWS:
            yield from _table_blocks(number, given)
        else:
            yield from _list_blocks(number, given, block_bytes)


def refuse_other_formats(inputs: Sequence[Input]) -> None:
    """Raise ``ValueError`` if a file has no rows, as its name says."""
    for given in inputs:
        if given.format not in (LINES, ROWS) and not given.path.lower().endswith(".json"):
            raise ValueError(
                f"{given.path}: must be .jsonl, .ndjson, .json or .parquet, which have rows"
            )


def rows_of(block: Block, max_bytes: int, bad: list[Bad]) -> Iterator[tuple[int, Any]]:
    """Each row of a block with its number; what is none is added to ``bad``."""
    if isinstance(block.data, bytes):
        yield from _parsed(block, block.data, max_bytes, bad)
    else:
        yield from enumerate(block.data, block.first)
    if block.fault:
        line = block.first + _count(block.data) if block.data else block.first
        bad.append(Bad(block.file, line, block.fault))


def _parsed(block: Block, data: bytes, max_bytes: int, bad: list[Bad]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(data.split(b"\n"), block.first):
        if not line.strip():
            continue
        try:
            if len(line) > max_bytes:
                raise _NoRow(f"is longer than {max_bytes} bytes")
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            bad.append(Bad(block.file, number, "is not UTF-8"))
        except RecursionError:
            bad.append(Bad(block.file, number, "is nested too deeply"))
        except _NoRow as error:
            bad.append(Bad(block.file, number, str(error)))
        except ValueError:
            bad.append(Bad(block.file, number, "is not JSON"))
        else:
            yield number, row


class _NoRow(Exception):
    """Why a line is no row."""


def _line_blocks(number: int, given: Input, block_bytes: int, max_bytes: int) -> Iterator[Block]:
    line = 1
    for data, fault, nbytes in _runs(given, block_bytes, max_bytes):
        if line == 1:
            data = data.removeprefix(BOM)
        yield Block(given.path, number, line, data, fault, nbytes)
        line += data.count(b"\n")


def _runs(given: Input, block_bytes: int, max_bytes: int) -> Iterator[tuple[bytes, str, int]]:
    """Whole lines of a file in runs of about ``block_bytes``; of a longer line, its beginning."""
    if given.compression:
        limits = {"unit_bytes": block_bytes, "max_bytes": max_bytes}
        for run in runs_of_lines(given.path, given.compression, **limits):
            yield run.data, run.fault, run.nbytes
        return
    with open(given.path, "rb") as file:
        while data := file.read(block_bytes):
            if not data.endswith(b"\n"):
                data += file.readline(max_bytes + 1)
            nbytes = len(data)
            if not data.endswith(b"\n"):
                while (part := file.readline(_STEP)) and not part.endswith(b"\n"):
                    nbytes += len(part)
                if part:
                    data += b"\n"
            yield data, "", nbytes


def _table_blocks(number: int, given: Input) -> Iterator[Block]:
    parquet, arrow = open_parquet()
    first, done = 1, 0
    try:
        with parquet.ParquetFile(given.path) as file:
            total = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(_ROWS, use_threads=False):
                rows = [_without_nulls(row) for row in batch.to_pylist()]
                through = given.size * (first - 1 + len(rows)) // total
                yield Block(given.path, number, first, rows, "", through - done)
                first, done = first + len(rows), through
    except (arrow.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system
        fault = "and the rows after it cannot be read"
        if first == 1:
            fault = "is no Parquet file that can be read"
        yield Block(given.path, number, first if first > 1 else 0, [], fault, given.size - done)


def _list_blocks(number: int, given: Input, block_bytes: int) -> Iterator[Block]:
    """The rows of a list as lines, which travel whatever their depth."""
    rows, fault = _list(given.path)
    if fault:
        yield Block(given.path, number, 0, b"", fault, given.size)
        return
    lines, first, done = bytearray(), 1, 0
    for place, row in enumerate(rows, 1):
        fault = ""
        try:
            lines += json.dumps(row).encode() + b"\n"
        except RecursionError:
            fault = "is nested too deeply"
        if fault or len(lines) >= block_bytes or place == len(rows):
            through = given.size * place // len(rows)
            yield Block(given.path, number, first, bytes(lines), fault, through - done)
            lines, first, done = bytearray(), place + 1, through


def _list(path: str) -> tuple[list[Any], str]:
    """The rows of a file that is a list of them, or why it is none."""
    try:
        with open(path, "rb") as file:
            rows = json.loads(file.read().removeprefix(BOM).decode())
    except UnicodeDecodeError:
        return [], "is not UTF-8"
    except RecursionError:
        return [], "is nested too deeply"
    except ValueError:
        return [], "is not JSON"
    return (rows, "") if isinstance(rows, list) else ([], "is no JSON list of rows")


def _without_nulls(value: Any) -> Any:
    """A table's row without the fields that only other rows have."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _count(data: bytes | list[Any]) -> int:
    return data.count(b"\n") if isinstance(data, bytes) else len(data)
