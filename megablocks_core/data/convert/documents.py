"""What formats have in common: a source gives documents in batches, and counts what it met.

Dimensions: T tokens, D documents of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

RUN = 1 << 20  # tokens of a batch, if no document has more


class Batch(NamedTuple):
    """Documents end to end.

    Attributes:
        tokens: [T] of all.
        lengths: [D] int64, of each.
        nbytes: Of the source that were read for them, for the progress.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    nbytes: int

    def documents(self) -> Iterator[np.ndarray]:
        """The tokens of each."""
        start = 0
        for stop in np.cumsum(self.lengths).tolist():
            yield self.tokens[start:stop]
            start = stop

    def runs(self, most: int = RUN) -> Iterator[Batch]:
        """The same documents in batches of at most so many tokens, or one document."""
        ends = np.cumsum(self.lengths)
        first, start = 0, 0
        while first < len(ends):
            last = max(int(np.searchsorted(ends, start + most, "right")), first + 1)
            stop = int(ends[last - 1])
            yield Batch(self.tokens[start:stop], self.lengths[first:last], 0)
            first, start = last, stop


class BadSource(ValueError):
    """A source that is damaged, or whose ids do not fit where they are to be stored."""


@dataclass
class Counts:
    """What a conversion met; ``ConvertReport`` says what each is."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    joined: int = 0
    unterminated: int = 0
    ends_added: int = 0
    inner_ends: int = 0


class Source(Protocol):
    """Documents of a format.

    Attributes:
        dtype: Of the tokens.
        nbytes: Of all of it.
        tokenizer: What names it, where the source says so.
    """

    dtype: np.dtype
    nbytes: int
    tokenizer: str | None

    def batches(self, counts: Counts) -> Iterator[Batch]:
        """All documents, in order; what is met is counted."""
        ...


def stored_as(tokens: np.ndarray, dtype: np.dtype, place: str) -> np.ndarray:
    """Tokens in another dtype, in which none may wrap.

    Raises:
        BadSource: One does not fit.
    """
    if np.can_cast(tokens.dtype, dtype, "safe") or not len(tokens):
        return tokens.astype(dtype, copy=False)
    if tokens.dtype.kind not in "iu" or dtype.kind not in "iu":
        raise ValueError(f"{place}: tokens of {tokens.dtype} do not convert to {dtype} exactly")
    limits = np.iinfo(dtype)
    for token in (int(tokens.min()), int(tokens.max())):
        if not limits.min <= token <= limits.max:
            raise BadSource(
                f"{place}: token id {token} must be from {limits.min} to {limits.max} to be stored "
                f"as {dtype.name}"
            )
    return tokens.astype(dtype)
