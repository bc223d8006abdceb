"""How a batch of sequences is gone through: a few chunks at a time, that caches hold.

Only lengths decide, never what a tensor holds.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

# Elements of the decays between the tokens of chunks that are worked on at a time.
_ON_CPU, _ON_DEVICE = 1 << 17, 1 << 26


class Span(NamedTuple):
    """Chunks of equal length, side by side, of some rows.

    Attributes:
        rows: Which rows.
        start: The first token.
        number: n, how many chunks.
        length: q, tokens of each.
        chunk: The number of the first chunk in its row.
        index: The number of the span in its row.
    """

    rows: slice
    start: int
    number: int
    length: int
    chunk: int
    index: int

    def of(self, tokens: Tensor) -> Tensor:
        """Its part of [B L ...] as a view [n b q ...]."""
        part = tokens[self.rows, self.start : self.start + self.number * self.length]
        return part.unflatten(1, (self.number, self.length)).transpose(0, 1)


def chunks_at_a_time(x: Tensor, chunk_size: int) -> int:
    """How many chunks of ``x`` [B L H P] a span has at most."""
    room = _ON_CPU if x.device.type == "cpu" else _ON_DEVICE
    return max(1, room // (x.shape[2] * chunk_size * chunk_size))


def count_spans(x: Tensor, chunk_size: int) -> int:
    """How many spans a row of ``x`` [B L H P] has."""
    length, most = x.shape[1], chunks_at_a_time(x, chunk_size)
    whole, rest = length // chunk_size, length % chunk_size
    return (whole + most - 1) // most + (rest + chunk_size - 1) // chunk_size


def spans_of_rows(x: Tensor, chunk_size: int) -> Iterator[list[Span]]:
    """The spans of some rows of ``x`` [B L H P] in order, then those of the next rows.

    The last span of a row is its last chunk, if that is shorter than the others.
    """
    batch, length = x.shape[:2]
    whole, most = length // chunk_size, chunks_at_a_time(x, chunk_size)
    together = max(1, most // max(whole, 1))
    for row in range(0, batch, together):
        rows = slice(row, min(row + together, batch))
        spans = [
            Span(rows, chunk * chunk_size, min(most, whole - chunk), chunk_size, chunk, index)
            for index, chunk in enumerate(range(0, whole, most))
        ]
        if length % chunk_size:
            start = whole * chunk_size
            spans.append(Span(rows, start, 1, length - start, whole, len(spans)))
        yield spans
