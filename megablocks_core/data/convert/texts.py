"""Texts of a source become documents of ids, by a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from megablocks_core.data.builder import smallest_dtype
from megablocks_core.data.convert.documents import BadSource, Batch, Counts
from megablocks_core.data.tokenize.encoders import Encoder, Ids, end_of_document, open_encoder
from megablocks_core.data.tokenize.fast_engine import AUTO, choose_engine

_CHARACTERS = 1 << 20  # encoded at a time


class Texts(NamedTuple):
    """Some texts, and the bytes of the source that were read for them."""

    texts: list[str]
    nbytes: int


class TextSource:
    """Documents of the ids of texts; one without ids gives no document, and is ``empty``.

    Args:
        read: Gives the texts.
        nbytes: Of the source.
        tokenizer: Its spec, as ``megablocks-tokenize`` has it.
        append_eod: End each document with the tokenizer's own end, or with this token or id.

    Raises:
        ValueError: There is no tokenizer, or it has no such end.
        BadSource: The tokenizer fails on a text.
    """

    def __init__(
        self,
        read: Callable[[], Iterator[Texts]],
        nbytes: int,
        tokenizer: str | None,
        append_eod: bool | int | str,
    ) -> None:
        if tokenizer is None:
            raise ValueError("tokenizer=None must name one: the source holds texts")
        self._read, self._spec, self.nbytes = read, tokenizer, nbytes
        self._plain = open_encoder(tokenizer)
        self._end = end_of_document(self._plain, append_eod)
        self.tokenizer: str | None = self._plain.name
        self.dtype = smallest_dtype(self._plain.vocab_size)

    def batches(self, counts: Counts) -> Iterator[Batch]:
        """All documents, in order."""
        encoder: Encoder | None = None
        before = 0
        for texts, nbytes in self._read():
            if encoder is None:
                _, encoder = choose_engine(self._spec, AUTO, self._plain, texts[:16])
            for some in _runs(texts):
                yield self._batch(self._encode(encoder, some, before), counts)
                before += len(some)
            yield Batch(np.empty(0, self.dtype), np.empty(0, np.int64), nbytes)

    def _encode(self, encoder: Encoder, texts: list[str], before: int) -> Ids:
        try:
            return encoder.encode(texts)
        except BaseException as error:  # a panic of an engine in Rust is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            if len(texts) == 1:
                why = f"cannot be encoded by the tokenizer: {error}"
                raise BadSource(f"text {before} {texts[0][:60]!r} {why}") from None
        each = [self._encode(encoder, [text], before + at) for at, text in enumerate(texts)]
        ids, lengths = zip(*each, strict=True)
        return Ids(np.concatenate(ids), np.concatenate(lengths))

    def _batch(self, found: Ids, counts: Counts) -> Batch:
        lengths = found.lengths[found.lengths > 0]
        counts.empty += len(found.lengths) - len(lengths)
        ids = found.ids.astype(self.dtype)
        if self._end is not None:
            ids = np.insert(ids, np.cumsum(lengths), self._end)
            lengths = lengths + 1
        return Batch(ids, lengths.astype(np.int64), 0)


def _runs(texts: list[str]) -> Iterator[list[str]]:
    """The texts in runs of about ``_CHARACTERS``."""
    run, size = [], 0
    for text in texts:
        run.append(text)
        size += len(text)
        if size >= _CHARACTERS:
            yield run
            run, size = [], 0
    if run:
        yield run
