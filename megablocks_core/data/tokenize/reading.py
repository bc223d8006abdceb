"""The texts of a unit of work, and what of it is none.

Everything that an input can hold becomes a text, an empty text, or a ``Bad`` with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import xxhash

from megablocks_core.data.tokenize.compressed import whole_text
from megablocks_core.data.tokenize.flat_texts import FlatTexts, LinePlaces
from megablocks_core.data.tokenize.units import Held, Lines, Rows, Texts, Unit, open_parquet

try:
    import megablocks_core._native as _native
except ModuleNotFoundError:  # a pure wheel; an extension that is there and broken still raises
    _native = None

BOM = b"\xef\xbb\xbf"
_STEP = 1 << 16


class Bad(NamedTuple):
    """A line or row, counted from 1 in the unit, or a whole file (``line`` 0), that is no text."""

    file: int
    line: int
    reason: str


class BadText(ValueError):
    """An input that holds what is no text, where that is to stop the run."""


class Read(NamedTuple):
    """What a unit holds.

    Attributes:
        texts: Its texts, empty ones too.
        places: File and line of each.
        bad: What is no text.
        lines: How many lines or rows there are.
        pieces: Hashes of the pieces of its files.
    """

    texts: Sequence[str]
    places: Sequence[tuple[int, int]]
    bad: list[Bad]
    lines: int
    pieces: bytes


class _NoText(Exception):
    """Why something is no text."""


class UnitReader:
    """Reads units; it keeps a Parquet file open, whose next rows are likely to be asked for.

    Args:
        key: Of the text in a JSON object, and name of its column in Parquet.
        max_bytes: A longer line or text is bad.
        plain: Read all JSON by the standard library. Else the extension, where it is built, reads
            lines that plainly have a text; whatever it does not take is read so.
    """

    def __init__(self, key: str, max_bytes: int, *, plain: bool = False) -> None:
        self.key, self.max_bytes = key, max_bytes
        self._key: bytes | None = None
        if not plain and _native is not None:
            with suppress(UnicodeEncodeError):
                self._key = key.encode()
        self._open: tuple[str, int, int, Iterator[Any]] | None = None

    def read(self, unit: Unit) -> Read:
        """The texts of a unit."""
        match unit:
            case Texts():
                return self._whole_files(unit)
            case Lines():
                data, pieces = _lines_between(unit, self.max_bytes)
                return self._lines(unit.files[0], data, unit.start == 0, pieces)
            case Held():
                read = self._lines(unit.files[0], unit.data, unit.first, unit.pieces)
                if unit.fault:
                    read.bad.append(Bad(unit.files[0], read.lines + 1, unit.fault))
                return read
            case Rows():
                return self._rows(unit)

    def _whole_files(self, unit: Texts) -> Read:
        texts, places, bad, pieces = [], [], [], bytearray()
        for file, path, compression in zip(unit.files, unit.paths, unit.compressions, strict=True):
            line = 0
            if compression:
                whole = whole_text(path, compression, piece=unit.piece, max_bytes=self.max_bytes)
                data, hashes, fault = whole.data, whole.pieces, whole.fault
            else:
                data, hashes, fault = *_whole_file(path, unit.piece, self.max_bytes), ""
            pieces += hashes
            try:
                if fault:
                    raise _NoText(fault)
                self._check_length(len(data))
                line, text = 1, ""
                text = data.removeprefix(BOM).decode()
                texts.append(_checked(text))
                places.append((file, 0))
            except UnicodeDecodeError as error:
                line = data.count(b"\n", 0, error.start + 1) + 1
                bad.append(Bad(file, line, "is not UTF-8"))
            except _NoText as error:
                bad.append(Bad(file, 0, str(error)))
        return Read(texts, places, bad, 0, bytes(pieces))

    def _lines(self, file: int, data: bytes, first: bool, pieces: bytes) -> Read:
        if first:
            data = data.removeprefix(BOM)
        if self._key is None or _native is None:
            lines = _lines_of(data)
            return self._plain_lines(file, enumerate(lines, 1))._replace(
                lines=len(lines), pieces=pieces
            )
        flat, ends, numbers, others, count = _native.texts_of_lines(
            data, key=self._key, max_bytes=self.max_bytes
        )
        left = others.reshape(-1, 3).tolist()
        rest = self._plain_lines(file, ((number, data[at:end]) for number, at, end in left))
        texts, places = FlatTexts(flat, ends), LinePlaces(file, numbers)
        if rest.texts:
            rows = [*zip(places, texts, strict=True), *zip(rest.places, rest.texts, strict=True)]
            places, texts = zip(*sorted(rows), strict=True)
        return Read(texts, places, rest.bad, count, pieces)

    def _plain_lines(self, file: int, lines: Iterable[tuple[int, str | bytes]]) -> Read:
        """The plain twin."""
        texts, places, bad = [], [], []
        for number, line in lines:
            try:
                if (text := self._text_of(line)) is not None:
                    texts.append(_checked(text))
                    places.append((file, number))
            except UnicodeDecodeError:
                bad.append(Bad(file, number, "is not UTF-8"))
            except _NoText as error:
                bad.append(Bad(file, number, str(error)))
        return Read(texts, places, bad, 0, b"")

    def _text_of(self, line: str | bytes) -> Any:
        """What a line has for a text; ``None`` if it is blank."""
        if len(line) * 4 > self.max_bytes:
            self._check_length(len(line if isinstance(line, bytes) else line.encode()))
        if not (line := line if isinstance(line, str) else line.decode()).strip():
            return None
        try:
            value = json.loads(line)
        except RecursionError:
            raise _NoText("is nested too deeply") from None
        except ValueError:
            raise _NoText("is not JSON") from None
        if not isinstance(value, dict):
            raise _NoText("is no JSON object")
        if self.key not in value:
            raise _NoText(f"has no {self.key!r}")
        text = value[self.key]
        return False if text is None else text

    def _rows(self, unit: Rows) -> Read:
        file = unit.files[0]
        texts, places, bad = [], [], []
        read = Read(texts, places, bad, unit.stop - unit.start, _hash_range(unit))
        if unit.fault:
            bad.append(Bad(file, 0, unit.fault))
            return read
        if not read.lines:
            return read
        _, arrow = open_parquet()
        try:
            values = self._next_rows(unit, arrow)
        except (arrow.ArrowException, OSError, EOFError) as error:
            self._open = None
            if isinstance(error, OSError) and error.errno is not None:
                raise
            bad.append(Bad(file, 1, "and the rows after it cannot be read"))
            return read
        for number, value in enumerate(values, 1):
            try:
                if value is None:
                    raise _NoText("has no string for a text")
                self._check_length(len(value))
                texts.append(_checked(value.decode()))
                places.append((file, number))
            except UnicodeDecodeError:
                bad.append(Bad(file, number, "is not UTF-8"))
            except _NoText as error:
                bad.append(Bad(file, number, str(error)))
        return read

    def _next_rows(self, unit: Rows, arrow: Any) -> list[bytes | None]:
        """The rows of a unit, by going on where the last one ended if that is before it."""
        path, group, at, batches = self._open or ("", 0, 0, iter(()))
        if (path, group) != (unit.path, unit.group) or at > unit.start:
            file = open_parquet()[0].ParquetFile(unit.path)
            batches = file.iter_batches(
                unit.step, row_groups=[unit.group], columns=[self.key], use_threads=False
            )
            at = 0
        values: list[bytes | None] = []
        while at < unit.stop and (batch := next(batches, None)) is not None:
            column = batch.column(0)
            low, high = max(unit.start - at, 0), min(unit.stop - at, len(column))
            if low < high:
                part = column.slice(low, high - low)
                if arrow.types.is_dictionary(part.type):
                    part = part.dictionary_decode()
                values += part.cast(arrow.large_binary()).to_pylist()
            at += len(column)
        self._open = (unit.path, unit.group, at, batches) if at == unit.stop else None
        return values

    def _check_length(self, nbytes: int) -> None:
        if nbytes > self.max_bytes:
            raise _NoText(f"is longer than {self.max_bytes} bytes")


def _checked(text: Any) -> str:
    """What is in the place of a text, if it is one."""
    if not isinstance(text, str):
        raise _NoText("has no string for a text")
    if "\0" in text:
        raise _NoText("holds a NUL")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _NoText("holds half a surrogate pair") from None
    return text


def _lines_of(data: bytes) -> list[str] | list[bytes]:
    """What stands between the ends of lines."""
    try:
        lines: list[Any] = data.decode().split("\n")
    except UnicodeDecodeError:  # one of them; the others are as good as ever
        lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _lines_between(unit: Lines, max_bytes: int) -> tuple[bytes, bytes]:
    """The lines that begin in a range, the last one to its end or past ``max_bytes``."""
    with open(unit.path, "rb") as file:
        file.seek(max(unit.start - 1, 0))
        before = file.read(1) if unit.start else b"\n"
        data = file.read(unit.stop - unit.start)
        pieces = xxhash.xxh3_128_digest(data)
        first = 0 if before == b"\n" else data.find(b"\n") + 1
        if not first and before != b"\n":
            return b"", pieces
        parts: list[bytes | memoryview] = [memoryview(data)[first:]]
        length = len(data) - max(first, data.rfind(b"\n") + 1)
        while length and length <= max_bytes:
            part = file.read(_STEP)
            end = part.find(b"\n")
            parts.append(part[: end + 1] if end >= 0 else part)
            length = 0 if end >= 0 or not part else length + len(part)
    return b"".join(parts), pieces


def _whole_file(path: str, piece: int, max_bytes: int) -> tuple[bytes, bytes]:
    """A file's bytes, one more than ``max_bytes`` at most, and the hashes of its pieces."""
    held, hashes = bytearray(), bytearray()
    with open(path, "rb") as file:
        while part := file.read(piece):
            hashes += xxhash.xxh3_128_digest(part)
            held += part[: max(0, max_bytes + 1 - len(held))]
    return bytes(held), bytes(hashes)


def _hash_range(unit: Rows) -> bytes:
    start, stop = unit.hashed
    hashes = bytearray()
    with open(unit.path, "rb") as file:
        file.seek(start)
        for at in count(start, unit.piece):
            if at >= stop:
                return bytes(hashes)
            hashes += xxhash.xxh3_128_digest(file.read(min(unit.piece, stop - at)))
    raise AssertionError
