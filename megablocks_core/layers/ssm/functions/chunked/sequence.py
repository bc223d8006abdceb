"""A recurrence over whole sequences: rows, packed documents, or this rank's pieces of either.

Dimensions: B rows, L tokens, E documents, Q tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.arguments import check_shapes
from megablocks_core.layers.ssm.functions.chunked.borders import Borders
from megablocks_core.layers.ssm.functions.chunked.layout import (
    Documents,
    lay_out,
    to_chunks,
    to_tokens,
)
from megablocks_core.layers.ssm.functions.chunked.scan import recurrence_of, scan, state_map
from megablocks_core.layers.ssm.functions.documents import check_documents
from megablocks_core.layers.ssm.functions.passing import documents_of, over_cut
from megablocks_core.parallel.checks import check_flags, check_whole
from megablocks_core.parallel.sequence import SequenceCut


def over_sequence(
    name: str,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor] = (),
    *,
    state_shape: tuple[int, ...],
    dtype: torch.dtype,
    chunk_size: int,
    steps: int = 1,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cut: SequenceCut | None = None,
    return_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Outputs of every step [B m L ...], and the states behind rows or documents.

    Args:
        name: Of the recurrence.
        inputs: [B m L ...] each, m entries a token.
        constants: Tensors without tokens.
        state_shape: Of one state.
        dtype: Of states, and in which all is computed.
        chunk_size: Steps that are computed at once.
        steps: m.
        initial_state: [B state], or [E state] with documents; default zeros.
        cu_seqlens: Sums of the documents' lengths in tokens [E+1], of one row.
        cut: Of the sequence whose tokens these are this rank's of.
        return_final_state: Else ``None`` stands in place of the states.

    Raises:
        ValueError: ``chunk_size`` is not positive, ``initial_state`` has another shape, or see
            ``check_documents`` and ``over_cut``.
    """
    rows, count = inputs[0].shape[:2]
    check_whole("chunk_size", chunk_size, least=1)
    check_flags(return_final_state=return_final_state)
    sums = documents_of(cut, cu_seqlens, tokens=count // steps)
    states = rows if sums is None else len(sums) - 1
    check_shapes(initial_state=(initial_state, (states, *state_shape)))
    piece = _Piece(name, constants, state_shape, dtype, chunk_size, steps)
    if cut is not None and cut.group.size > 1:
        return over_cut(
            inputs,
            cut=cut,
            state_map=partial(piece.map, initial_state=initial_state),
            scan=partial(piece.scan, initial_state=initial_state, finals=return_final_state),
            compose=recurrence_of(name).compose,
            initial_state=initial_state,
        )
    check_documents(sums, rows=rows, length=count // steps)
    if sums is None:
        carry = inputs[0].new_zeros((rows, *state_shape), dtype=dtype)
        carry = carry if initial_state is None else initial_state.to(dtype)
        return piece.scan(*inputs, cu_seqlens=None, carry=carry, finals=return_final_state)
    return piece.scan(
        *inputs, cu_seqlens=sums, initial_state=initial_state, finals=return_final_state
    )


class _Piece:
    """The recurrence over tokens that follow each other, with what is alike in all pieces."""

    def __init__(
        self,
        name: str,
        constants: Sequence[Tensor],
        state_shape: tuple[int, ...],
        dtype: torch.dtype,
        chunk_size: int,
        steps: int,
    ) -> None:
        self.name, self.constants = name, constants
        self.state_shape, self.dtype = state_shape, dtype
        self.chunk_size, self.steps = chunk_size, steps

    def map(
        self, *inputs: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The ``state_map`` of ``over_cut``."""
        documents, borders = self._borders(inputs[0], cu_seqlens, initial_state, carried=True)
        chunks = [to_chunks(x, self.chunk_size, documents) for x in inputs]
        return state_map(self.name, chunks, self.constants, self._zeros(inputs[0]), borders)

    def scan(
        self,
        *inputs: Tensor,
        cu_seqlens: Tensor | None,
        carry: Tensor | None = None,
        initial_state: Tensor | None = None,
        finals: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The ``scan`` of ``over_cut``; without ``carry`` every document starts in these tokens."""
        count = inputs[0].shape[1]
        documents, borders = self._borders(
            inputs[0], cu_seqlens, initial_state, carried=carry is not None
        )
        borders = borders if finals else borders._replace(last=None)
        chunks = [to_chunks(x, self.chunk_size, documents) for x in inputs]
        before = self._zeros(inputs[0]) if carry is None else carry
        y, final, of_documents = scan(self.name, chunks, self.constants, before, borders)
        y = to_tokens(y, count, documents)
        if not finals:
            return y, None
        if documents is None:
            return y, final
        unchanged = of_documents.new_zeros(()) if initial_state is None else initial_state
        empty = documents.empty.view(-1, *(1,) * len(self.state_shape))
        return y, torch.where(empty, unchanged.to(of_documents.dtype), of_documents)

    def _zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros((x.shape[0], *self.state_shape), dtype=self.dtype)

    def _borders(
        self, x: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None, *, carried: bool
    ) -> tuple[Documents | None, Borders]:
        """The layout of documents in chunks; if ``carried`` no state is set before the first."""
        if cu_seqlens is None:
            return None, Borders()
        documents = lay_out(cu_seqlens * self.steps, length=x.shape[1], chunk_size=self.chunk_size)
        first = documents.first
        if carried:
            first = first & (torch.arange(len(first), device=first.device) > 0)
        initial = None
        if initial_state is not None:
            # Behind the last document stand zeros.
            initial = torch.cat((initial_state.to(self.dtype), self._zeros(x)))
        return documents, Borders(first, documents.document, initial, documents.last)
