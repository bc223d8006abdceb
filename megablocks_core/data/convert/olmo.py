"""OLMo's NumPy files: token ids and nothing else, and where documents lie in a ``.csv.gz`` beside.

A ``.npy`` of OLMo has no header, and does not say its dtype. Documents end with an id, or are the
lines ``start,end`` (with more columns or not) of the file of the same name that ends in
``.csv.gz``.

Source: https://github.com/allenai/OLMo-core (``data/utils.py``) and
https://github.com/allenai/dolma, whose tokens command writes both files.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megablocks_core.data.convert.documents import RUN, BadSource, Batch, Counts
from megablocks_core.files import create_file, sync_file

DTYPES = ("uint8", "uint16", "uint32", "uint64")
SHARD_BYTES = 1 << 30
_HEADER = b"\x93NUMPY"


class OlmoSource:
    """The documents of a file, or of a folder's ``.npy`` files sorted by path.

    With ``eos`` documents end with that id; what follows the last one is a document, counted as
    ``unterminated``. Without, they are those of the ``.csv.gz`` files, which must cover all tokens.

    Raises:
        ValueError: There is no file, no dtype, or one that cannot be: a file has a header, ends
            within a token, or is another size than its ``.csv.gz`` says.
    """

    tokenizer: str | None = None

    def __init__(self, path: Path, dtype: np.dtype | None, eos: int | None) -> None:
        names = ", ".join(DTYPES)
        if dtype is None or dtype.name not in DTYPES:
            raise ValueError(
                f"source_dtype={dtype and dtype.name!r} must be one of {names}: files of OLMo do "
                f"not say which"
            )
        if eos is not None and not 0 <= eos <= np.iinfo(dtype).max:
            raise ValueError(f"eos={eos} must be an id that {dtype.name} holds")
        self.paths = sorted(path.rglob("*.npy")) if path.is_dir() else [path]
        if not self.paths or not all(one.is_file() for one in self.paths):
            raise ValueError(f"{path}: must be a .npy file or a folder of them")
        self.dtype, self.eos = dtype, eos
        self.nbytes = 0
        for one in self.paths:
            self.nbytes += _checked_size(one, dtype)
            if eos is None and not _lines_of(one).is_file():
                raise ValueError(
                    f"{_lines_of(one)} is missing: give eos= to find documents by the id they end "
                    f"with"
                )

    def batches(self, counts: Counts) -> Iterator[Batch]:
        """All documents, in order."""
        for path in self.paths:
            if path.stat().st_size:
                tokens = np.asarray(np.memmap(path, self.dtype, "r"))
            else:
                tokens = np.empty(0, self.dtype)
            if self.eos is None:
                yield from _by_lines(tokens, _lines_of(path))
            else:
                yield from _by_end(tokens, self.eos, counts)


def write_olmo(folder: Path, batches: Iterator[Batch], dtype: np.dtype, shard_bytes: int) -> int:
    """Write ``part-NNNNN.npy`` of at most so many bytes, or one document; returns how many."""
    if dtype.name not in DTYPES:
        raise ValueError(f"target_dtype={dtype.name} must be one of {', '.join(DTYPES)}")
    part: _Part | None = None
    number = 0
    try:
        for batch in batches:
            for run in batch.runs(max(1, min(RUN, shard_bytes // dtype.itemsize))):
                if part is None or part.nbytes + run.tokens.nbytes > shard_bytes:
                    if part is not None:
                        part.finish()
                    part = _Part(folder / f"part-{number:05}.npy")
                    number += 1
                part.write(run)
        if part is not None:
            part.finish()
    finally:
        if part is not None:
            part.close()
    return number


def with_ends(batches: Iterator[Batch], eos: int, counts: Counts) -> Iterator[Batch]:
    """Documents that all end with an id: it is put where it is missing.

    Raises:
        ValueError: The id does not fit the dtype of the tokens.
    """
    for batch in batches:
        tokens, lengths = batch.tokens, batch.lengths
        if not 0 <= eos <= np.iinfo(tokens.dtype).max:
            raise ValueError(f"eos={eos} must be an id that {tokens.dtype.name} holds")
        ends = np.cumsum(lengths)
        last = np.full(len(lengths), -1, np.int64)
        filled = lengths > 0
        last[filled] = tokens[ends[filled] - 1]
        missing = last != eos
        counts.ends_added += int(missing.sum())
        counts.inner_ends += int(np.count_nonzero(tokens == eos)) - int((~missing).sum())
        if missing.any():
            tokens = np.insert(tokens, ends[missing], eos)
            lengths = lengths + missing
        yield Batch(tokens, lengths, batch.nbytes)


class _Part:
    """A file in the making, with its lines."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115
        self._path, self._lines = path, io.BytesIO()
        self._zipped = gzip.GzipFile("", "wb", fileobj=self._lines, mtime=0)
        self._tokens = self.nbytes = 0

    def write(self, batch: Batch) -> None:
        """Append documents."""
        self._file.write(np.ascontiguousarray(batch.tokens).data)
        ends = np.cumsum(batch.lengths) + self._tokens
        starts = ends - batch.lengths
        rows = zip(starts.tolist(), ends.tolist(), strict=True)
        self._zipped.write("".join(f"{start},{end}\n" for start, end in rows).encode())
        self._tokens += len(batch.tokens)
        self.nbytes += batch.tokens.nbytes

    def finish(self) -> None:
        """Make both files durable."""
        self._zipped.close()
        create_file(_lines_of(self._path), self._lines.getvalue())
        sync_file(self._file)
        self._file.close()

    def close(self) -> None:
        """Let the file go, whole or not."""
        self._file.close()


def _lines_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".npy") + ".csv.gz")


def _checked_size(path: Path, dtype: np.dtype) -> int:
    size = path.stat().st_size
    with open(path, "rb") as file:
        if file.read(len(_HEADER)) == _HEADER:
            raise BadSource(f"{path}: has a header of NumPy, of which files of OLMo have none")
    if size % dtype.itemsize:
        raise BadSource(f"{path}: holds {size} bytes, no whole number of tokens of {dtype.name}")
    return size


def _by_end(tokens: np.ndarray, eos: int, counts: Counts) -> Iterator[Batch]:
    start = 0
    for at in range(0, len(tokens), RUN):
        ends = np.flatnonzero(tokens[at : at + RUN] == eos) + at + 1
        if len(ends):
            yield _batch(tokens, start, ends)
            start = int(ends[-1])
    if start < len(tokens):
        counts.unterminated += 1
        yield _batch(tokens, start, np.array([len(tokens)]))


def _by_lines(tokens: np.ndarray, path: Path) -> Iterator[Batch]:
    start, ends, last = 0, [], 0
    for number, (begin, end) in enumerate(_spans(path), 1):
        if begin != last or not begin <= end <= len(tokens):
            raise BadSource(
                f"{path}:{number} has the document {begin} to {end}, must go on at {last} within "
                f"{len(tokens)} tokens"
            )
        ends.append(end)
        last = end
        if last - start >= RUN or len(ends) >= RUN:
            yield _batch(tokens, start, np.array(ends))
            start, ends = last, []
    if ends:
        yield _batch(tokens, start, np.array(ends))
    if last != len(tokens):
        raise BadSource(f"{path}: ends at token {last}, must end at {len(tokens)}")


def _spans(path: Path) -> Iterator[tuple[int, int]]:
    number = 0
    try:
        with gzip.open(path, "rt") as file:
            for number, line in enumerate(file, 1):  # noqa: B007
                begin, end = line.split(",")[:2]
                yield int(begin), int(end)
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise BadSource(f"{path}: is damaged after line {number}: {error}") from None
    except ValueError:
        raise BadSource(f"{path}:{number} must begin with start,end") from None


def _batch(tokens: np.ndarray, start: int, ends: np.ndarray) -> Batch:
    some = tokens[start : int(ends[-1])]
    return Batch(some, np.diff(ends, prepend=start).astype(np.int64), some.nbytes)
