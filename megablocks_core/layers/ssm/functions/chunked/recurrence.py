"""What a recurrence must say of itself so that it can be computed in chunks.

Dimensions: B rows, n chunks, Q tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

Tensors = Sequence[Tensor]
Scan = Callable[..., tuple[Tensor, Tensor, Tensor]]


class Way(Protocol):
    """What happens to the state between the chunks, which are counted from 0."""

    def enter(self, chunk: int, state: Tensor) -> Tensor:
        """The state before a chunk, from the one behind the chunk before."""
        ...


class WayBack(Way, Protocol):
    """What happens to the gradient of the state between the chunks."""

    def behind(self, chunk: int, dstate: Tensor) -> Tensor:
        """The gradient behind a chunk, from the one before the next as ``before`` gave it."""
        ...

    def before(self, chunk: int, dstate: Tensor) -> Tensor:
        """The gradient behind the chunk before, from that of the state that entered."""
        ...


class Recurrence(NamedTuple):
    """A recurrence whose state passes some chunks as ``s -> compose(transition, s) + addition``.

    Its functions see n chunks of B rows: inputs [B n Q ...] in the dtype of states, and constants
    without tokens. A place without a token has zeros in every input, and must change nothing.

    Attributes:
        like: The number of the input whose shape outputs have.
        forward: ``(inputs, constants, state, way, outputs) -> (y, states)``: outputs
            [B n Q ...], ``None`` if not asked for, and the states behind each chunk.
        backward: ``(inputs, constants, state, way_back, dy, dstate) -> (dinputs, dconstants,
            dstate)``; ``dy`` may be ``None``.
        state_map: ``(scan, inputs, constants, like, borders) -> (transition, addition)`` of all
            chunks, by ``scan`` and what torch differentiates; ``like`` is a state [B state].
        compose: Of a transition with a state or another transition behind it.
    """

    like: int
    forward: Callable[[Tensors, Tensors, Tensor, Way, bool], tuple[Tensor | None, Tensors]]
    backward: Callable[
        [Tensors, Tensors, Tensor, WayBack, Tensor | None, Tensor],
        tuple[Tensors, Tensors, Tensor],
    ]
    state_map: Callable[..., tuple[Tensor, Tensor]]
    compose: Callable[[Tensor, Tensor], Tensor]
