"""A unit of work, from its texts to what is written of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from megablocks_core.data.tokenize.encoders import Encoder, Ids, open_encoder
from megablocks_core.data.tokenize.fast_engine import HF, open_fast
from megablocks_core.data.tokenize.flat_texts import utf8_sizes
from megablocks_core.data.tokenize.reading import Bad, UnitReader
from megablocks_core.data.tokenize.units import Unit

_BATCH = 1 << 20  # bytes of text that are encoded at a time
_WIDE = 1 << 15  # ids that are hashed at a time, few enough for a cache


class Settings(NamedTuple):
    """What decides the ids of a unit.

    Attributes:
        tokenizer: Its spec.
        name: Of the tokenizer, which has its hash.
        engine: Not "auto".
        end: The id that ends each document, if one does.
        dtype: Of the ids.
        key: Of the text.
        max_bytes: Of a line or text.
        vocab_size: Of the tokenizer, if an engine that is not its own may be opened alone.
        threads: Whether other threads encode at the same time.
    """

    tokenizer: str
    name: str
    engine: str
    end: int | None
    dtype: str
    key: str
    max_bytes: int
    vocab_size: int = 0
    threads: bool = False

    def open(self) -> UnitEncoder:
        """What encodes by them."""
        return UnitEncoder(self)


class Encoded(NamedTuple):
    """Of one unit.

    Attributes:
        ids: Of all documents, end to end.
        lengths: Of each, int32.
        hashes: The content hash of each, uint64.
        empty: Texts that have no ids.
        bad: What is no text.
        lines: Lines or rows.
        text_bytes: In UTF-8, of what became documents.
        inner_ends: Ids equal to the end within documents, which came of the text.
        pieces: Hashes of the pieces of the files.
    """

    ids: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    empty: int
    bad: list[Bad]
    lines: int
    text_bytes: int
    inner_ends: int
    pieces: bytes


class UnitEncoder:
    """Encodes units, each by itself; the same unit gives the same anywhere."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._dtype = np.dtype(settings.dtype)
        spec, fast = settings.tokenizer, settings.engine != HF
        plain = None if fast and settings.vocab_size else open_encoder(spec)
        if fast:
            opened = open_fast(spec, plain, settings.vocab_size, threads=settings.threads)
        else:
            opened = plain
        assert opened is not None
        if opened.name != settings.name:
            raise ValueError(f"tokenizer={spec!r} has changed since the run began")
        self._encoder: Encoder = opened
        self._reader = UnitReader(settings.key, settings.max_bytes)

    def encode(self, unit: Unit) -> Encoded:
        """What is written of a unit."""
        read = self._reader.read(unit)
        bad, parts = list(read.bad), []
        sizes = utf8_sizes(read.texts)
        for start, stop in _batches(sizes, _BATCH):
            parts.append(self._ids(read.texts[start:stop], read.places[start:stop], bad))
        lengths = np.concatenate([part.lengths for part in parts] or [np.empty(0, np.int64)])
        ids = np.concatenate([part.ids for part in parts] or [np.empty(0, self._dtype)])
        documents = lengths[lengths > 0]
        end, inner = self.settings.end, 0
        if end is not None:
            inner = int(np.count_nonzero(ids == end))
            ids = np.insert(ids, np.cumsum(documents), end)
            documents = documents + 1
        return Encoded(
            ids=ids,
            lengths=documents.astype(np.int32),
            hashes=content_hashes(ids, documents),
            empty=int(len(lengths) - len(documents)) - (len(bad) - len(read.bad)),
            bad=sorted(bad),
            lines=read.lines,
            text_bytes=int(sizes[lengths > 0].sum()),
            inner_ends=inner,
            pieces=read.pieces,
        )

    def _ids(self, texts: Sequence[str], places: Sequence[tuple[int, int]], bad: list[Bad]) -> Ids:
        """The ids of texts; one that the tokenizer fails on is bad, and has none."""
        try:
            return self._checked(self._encoder.encode(texts))
        except BaseException as error:  # a panic of an engine in Rust is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            if len(texts) == 1:
                bad.append(Bad(*places[0], "cannot be encoded by the tokenizer"))
                return Ids(np.empty(0, self._dtype), np.zeros(1, np.int64))
        each = [self._ids([text], [place], bad) for text, place in zip(texts, places, strict=True)]
        return Ids(
            np.concatenate([part.ids for part in each]),
            np.concatenate([part.lengths for part in each]),
        )

    def _checked(self, found: Ids) -> Ids:
        """Ids in the dtype of the dataset, in which none may wrap."""
        limit = self._encoder.vocab_size
        if len(found.ids) and int(found.ids.max()) >= limit:
            raise ValueError(f"token id {found.ids.max()} must be below {limit}")
        return Ids(found.ids.astype(self._dtype), found.lengths)


def content_hashes(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The hash of each document as ``content.ContentHash`` has it, uint64."""
    hashes: list[int] = []
    ends = np.cumsum(lengths)
    for first, stop in _batches(lengths, _WIDE):
        start = int(ends[first] - lengths[first])
        wide = ids[start : ends[stop - 1]].astype("<i8").data
        at = 0
        for end in (ends[first:stop] - start).tolist():
            hashes.append(xxhash.xxh3_64_intdigest(wide[at:end]))
            at = end
    return np.array(hashes, np.uint64)


def _batches(sizes: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of ``most`` in all or so: each ends with the first one that brings it there."""
    ends, start = np.cumsum(sizes), 0
    while start < len(sizes):
        full = (int(ends[start - 1]) if start else 0) + most
        stop = min(int(np.searchsorted(ends, full)) + 1, len(sizes))
        yield start, stop
        start = stop
