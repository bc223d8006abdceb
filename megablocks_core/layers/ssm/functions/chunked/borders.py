"""What becomes of the state between chunks, where documents start and end.

Dimensions: B rows, n chunks, E documents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Borders(NamedTuple):
    """Where documents start and end, in chunks; rows have none of it.

    Attributes:
        first: Whether a chunk starts a document [n].
        document: Its document [n].
        initial: The states before documents [E+1 state]; ``None``: zeros.
        last: The last chunk of each document whose state is wanted [E].
    """

    first: Tensor | None = None
    document: Tensor | None = None
    initial: Tensor | None = None
    last: Tensor | None = None

    def within(self, start: int, stop: int) -> Borders:
        """Those of some chunks."""
        first, document = (
            None if x is None else x[start:stop] for x in (self.first, self.document)
        )
        last = None if self.last is None else self.last - start
        return Borders(first, document, self.initial, last)

    def enter(self, chunk: int, state: Tensor) -> Tensor:
        """The state before a chunk: the initial one where a document starts [B state]."""
        if self.first is None:
            return state
        initial = torch.zeros_like(state)
        if self.initial is not None and self.document is not None:
            initial = self.initial.index_select(0, self.document[chunk : chunk + 1])
        return torch.where(self.first[chunk], initial, state)

    def no_finals(self, state: Tensor) -> Tensor:
        """Room for the states behind documents [E state], or [0]."""
        if self.last is None:
            return state.new_zeros(0)
        return state.new_zeros(len(self.last), *state.shape[1:])

    def collect(self, finals: Tensor, states: list[Tensor]) -> Tensor:
        """``finals`` with the states behind the documents that end with one of these chunks."""
        if self.last is None:
            return finals
        place, here = self._here(len(states))
        ends = torch.stack(states, dim=1)[0].index_select(0, place)
        return torch.where(here.view(-1, *(1,) * (ends.dim() - 1)), ends, finals)

    def spread(self, dfinals: Tensor, count: int) -> Tensor | None:
        """The gradients of states behind each of ``count`` chunks [n state], from ``dfinals``."""
        if self.last is None:
            return None
        place, here = self._here(count)
        # Those that end elsewhere go to a place behind all chunks.
        place = torch.where(here, place, count)
        return dfinals.new_zeros(count + 1, *dfinals.shape[1:]).index_add(0, place, dfinals)[:-1]

    def _here(self, count: int) -> tuple[Tensor, Tensor]:
        """The chunk that each document ends with, and whether it is one of ``count``."""
        assert self.last is not None
        return self.last.clamp(0, count - 1), (self.last >= 0) & (self.last < count)


class BordersBack:
    """The way of gradients through some chunks.

    Args:
        borders: Of these chunks.
        dfinals: Of all documents.
        dinitial: Sums of the gradients of initial states, added to in place; or ``None``.
        count: Of chunks.
    """

    def __init__(
        self, borders: Borders, dfinals: Tensor, dinitial: Tensor | None, count: int
    ) -> None:
        self.borders, self.dinitial = borders, dinitial
        self.ends = borders.spread(dfinals, count)

    def enter(self, chunk: int, state: Tensor) -> Tensor:
        """As ``Borders``."""
        return self.borders.enter(chunk, state)

    def behind(self, chunk: int, dstate: Tensor) -> Tensor:
        """The gradient of the state behind a chunk, with its own as a document's last."""
        return dstate if self.ends is None else dstate + self.ends[chunk]

    def before(self, chunk: int, dstate: Tensor) -> Tensor:
        """What goes on to the chunk before: nothing where a document starts."""
        first, document, *_ = self.borders
        if first is None or document is None:
            return dstate
        if self.dinitial is not None:
            own = torch.where(first[chunk], dstate, 0)
            self.dinitial.index_add_(0, document[chunk : chunk + 1], own)
        return torch.where(first[chunk], 0, dstate)
