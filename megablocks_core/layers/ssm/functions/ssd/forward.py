"""The scan forward, a span of chunks at a time.

Dimensions: n chunks of b rows, q tokens of a chunk, H heads in G groups of J, P features of a
head, N features of a state; s spans of a row, or its chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.ssd.chunks import Chunks, Inputs
from megablocks_core.layers.ssm.functions.ssd.rooms import Rooms
from megablocks_core.layers.ssm.functions.ssd.spans import Span, count_spans, spans_of_rows
from megablocks_core.layers.ssm.functions.steps import wide


class Scanned(NamedTuple):
    """What the scan gives.

    Attributes:
        y: [B L H P].
        final: The state behind the last token [B H P N].
        states: Those before each span, or before each chunk if asked [s B H P N].
    """

    y: Tensor
    final: Tensor
    states: Tensor


def empty_results(inputs: Inputs, chunk_size: int, every_chunk: bool) -> Scanned:
    """Results with anything in them."""
    x, kind = inputs.x, wide(inputs.x)
    batch, length, heads, features = x.shape
    state = (batch, heads, features, inputs.B.shape[-1])
    count = -(-length // chunk_size) if every_chunk else count_spans(x, chunk_size)
    return Scanned(
        x.new_empty(x.shape),
        x.new_empty(state, dtype=kind),
        x.new_empty((count, *state), dtype=kind),
    )


def scan(inputs: Inputs, carry: Tensor | None, chunk_size: int, every_chunk: bool) -> Scanned:
    """Run it from ``carry`` [B H P N] on, the state before the first token, or from zeros."""
    results = empty_results(inputs, chunk_size, every_chunk)
    y, final, kept = results
    rooms = Rooms(inputs.x, kept.dtype)
    final.zero_() if carry is None else final.copy_(carry)
    D = None if inputs.D is None else inputs.D.to(rooms.dtype)
    for spans in spans_of_rows(inputs.x, chunk_size):
        for span in spans:
            chunks = Chunks(inputs, span, rooms)
            states = chunks.states(final[span.rows], entries_of(inputs, span), rooms)
            if every_chunk:
                kept[span.chunk : span.chunk + span.number, span.rows] = states[:-1]
            else:
                kept[span.index, span.rows] = states[0]
            _write(span.of(y), chunks, states, D, rooms)
            final[span.rows] = states[-1]
    return results


def entries_of(inputs: Inputs, span: Span) -> Tensor | None:
    """What is added to the states behind a span's chunks [n b H P N]."""
    if inputs.entries is None:
        return None
    return inputs.entries[span.chunk : span.chunk + span.number, span.rows]


def _write(y_nbqHP: Tensor, chunks: Chunks, states: Tensor, D: Tensor | None, rooms: Rooms) -> None:
    n, b, G, q, J, P, _ = chunks.shape
    matrix = rooms.of("matrix", n, b, G * J, q, q)
    matrix = chunks.matrix_(chunks.decays.between(matrix))
    met = rooms.of("met", n, b, G * J, q, P)
    torch.bmm(matrix.view(-1, q, q), chunks.moved.view(-1, q, P), out=met.view(-1, q, P))
    read = chunks.from_states(states, rooms)

    narrow = y_nbqHP.dtype != rooms.dtype
    wide_nbqHP = rooms.of("y", n, b, q, G * J, P) if narrow else y_nbqHP
    y = chunks.grouped(wide_nbqHP)
    torch.mul(chunks.by_head(met), chunks.by_token(chunks.decays.low), out=y)
    y.addcmul_(read, chunks.by_token(chunks.decays.enter))
    y.addcmul_(chunks.x, chunks.by_token(chunks.skip(D)))
    if D is not None and D.dim() == 2:
        y.addcmul_(chunks.x, D.view(G, 1, J, P))
    if narrow:
        y_nbqHP.copy_(wide_nbqHP)
