"""What a recurrence must say of itself so that it can be computed in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

Tensors = Sequence[Tensor]


class Recurrence(NamedTuple):
    """A recurrence whose state passes a chunk as ``s -> compose(transition, s) + addition``.

    A chunk has Q tokens. Its functions see n chunks of B rows at once: inputs [B n Q ...] in the
    dtype of states, and constants without tokens. They are differentiated by torch, and computed
    again in backward. A place without a token has zeros in every input, and must change nothing.

    Attributes:
        prepare: From inputs and constants to the transitions [B n ...], the additions
            [B n state], and what ``outputs`` needs further.
        outputs: From the states before the chunks [B n state], what ``prepare`` gave further,
            inputs and constants to the outputs [B n Q ...].
        compose: Of a transition with a state or another transition behind it.
        identity: The transition that changes nothing, of the shape of the one given.
    """

    prepare: Callable[[Tensors, Tensors], tuple[Tensor, ...]]
    outputs: Callable[[Tensor, Tensors, Tensors, Tensors], Tensor]
    compose: Callable[[Tensor, Tensor], Tensor]
    identity: Callable[[Tensor], Tensor]
