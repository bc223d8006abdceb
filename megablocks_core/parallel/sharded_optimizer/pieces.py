"""What a sharded optimizer steps: a range of a parameter, in the precision that it works in.

A torch optimizer steps ``leaf``, a tensor of one dimension that is its parameter. For float32 and
float64 weights that is the weights' own memory. For 16-bit weights it is float32: a master copy
that stays, or one that is made for a step and rounded back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megablocks_core.parallel.sharded_optimizer.members import Member
from megablocks_core.parallel.sharded_optimizer.rounding import Rounding


class StochasticRounding(NamedTuple):
    """16-bit weights without a copy: updated in float32 and rounded by chance.

    Attributes:
        seed: Of the run. Equal on all ranks; with the step it says how each element is rounded.
    """

    seed: int = 0


class Piece:
    """A range of a parameter that this rank steps, in the weights' own memory.

    Attributes:
        parameter: The whole, as the module holds it.
        start: The first of its elements, flattened, that are in the range.
        weight: The range of its memory, of one dimension.
        leaf: What the optimizer steps.
    """

    def __init__(self, parameter: nn.Parameter, start: int, weight: Tensor) -> None:
        self.parameter, self.start, self.weight = parameter, start, weight
        self.leaf = weight

    @property
    def stop(self) -> int:
        """The element after the last."""
        return self.start + len(self.weight)

    def begin(self) -> None:
        """Before a step: ``leaf`` has the weights."""

    def finish(self, step: int) -> None:
        """After step number ``step``: the weights follow ``leaf``."""

    def rest(self) -> None:
        """Until the next step: nothing is kept that can be made again."""


class MasterPiece(Piece):
    """16-bit weights with a float32 master copy, which they are the rounding of.

    Where somebody has changed the weights since the last step (loaded others, say), the master
    starts from what is there now.
    """

    def __init__(self, parameter: nn.Parameter, start: int, weight: Tensor) -> None:
        super().__init__(parameter, start, weight)
        self.leaf = weight.float()

    def begin(self) -> None:
        """Take over what was changed."""
        kept = self.leaf.to(self.weight.dtype) == self.weight
        self.leaf.copy_(torch.where(kept, self.leaf, self.weight.float()))

    def finish(self, step: int) -> None:
        """Round to the nearest."""
        self.weight.copy_(self.leaf)


class RoundedPiece(Piece):
    """16-bit weights alone: float32 during a step, then rounded to the nearest or by chance."""

    def __init__(
        self, parameter: nn.Parameter, start: int, weight: Tensor, rounding: Rounding | None
    ) -> None:
        super().__init__(parameter, start, weight)
        self.leaf = weight.float()
        self._rounding = rounding

    def begin(self) -> None:
        """Widen the weights."""
        self.leaf.data = self.weight.float()

    def finish(self, step: int) -> None:
        """Round."""
        if self._rounding is None:
            self.weight.copy_(self.leaf)
        else:
            self._rounding.round_(self.weight, self.leaf, start=self.start, step=step)

    def rest(self) -> None:
        """Free what is wide."""
        self.leaf.data = self.leaf.new_empty(0)


def make_piece(
    member: Member, start: int, weight: Tensor, *, masters: bool | StochasticRounding
) -> Piece:
    """The piece of a range, by the dtype of its weights and what is wanted for 16-bit ones."""
    name, parameter, specs, _ = member
    if weight.dtype.itemsize > 2:
        return Piece(parameter, start, weight)
    if masters is True:
        return MasterPiece(parameter, start, weight)
    if masters is False:
        return RoundedPiece(parameter, start, weight, None)
    rounding = Rounding(name, tuple(parameter.shape), specs, seed=masters.seed)
    return RoundedPiece(parameter, start, weight, rounding)
