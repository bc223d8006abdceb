"""One bucket of a sharded optimizer on one rank: weights, the pieces it owns, what steps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megablocks_core.parallel.sharded_optimizer.elementwise import Kept, OptimizerMaker
from megablocks_core.parallel.sharded_optimizer.flat_parameters import FlatParameters
from megablocks_core.parallel.sharded_optimizer.host_states import Place
from megablocks_core.parallel.sharded_optimizer.members import Member
from megablocks_core.parallel.sharded_optimizer.pieces import (
    MasterPiece,
    StochasticRounding,
    make_piece,
)
from megablocks_core.parallel.sharded_optimizer.state import PieceState

Options = dict[str, Any]


class OptimizerBucket:
    """Steps this rank's pieces of a bucket, and sends them to the ranks that share it.

    Args:
        flat: The weights.
        members: Parameters, by index.
        maker: Makes the optimizer.
        options: Those of each parameter group.
        masters: How 16-bit weights are kept.

    Attributes:
        flat: The same.
        device: Where the bucket is.
        pieces: Of the parameters of which this rank owns something, by index.
        optimizer: What steps them; ``None`` where this rank owns none.
    """

    def __init__(
        self,
        flat: FlatParameters,
        members: Sequence[Member],
        *,
        maker: OptimizerMaker,
        options: Sequence[Options],
        masters: bool | StochasticRounding,
    ) -> None:
        self.flat, self.device = flat, flat.bucket.device
        self.optimizer: torch.optim.Optimizer | None = None
        self.pieces = {
            own.index: make_piece(members[own.index], own.start, flat.weight(own), masters=masters)
            for own in flat.ranges
            if own.length
        }
        self._homes = {index: members[index].home for index in self.pieces}
        # The parameter groups of which there are pieces here, and what is kept for those.
        self._kept: dict[int, Kept] = {}
        groups = []
        for number in sorted(set(self._homes.values())):
            leaves = [p.leaf for i, p in self.pieces.items() if self._homes[i] == number]
            groups.append({**options[number], "params": leaves})
            self._kept[number] = maker.kept(options[number], leaves[0])
        if groups:
            self.optimizer = maker.make(groups)
        for piece in self.pieces.values():
            piece.rest()

    def states(self) -> Iterator[tuple[int, PieceState]]:
        """What is kept of each piece, with the parameter's index."""
        for index, piece in self.pieces.items():
            yield index, PieceState(piece, self.state_of(index), self._kept[self._homes[index]])

    def state_of(self, index: int) -> dict[str, Any]:
        """What the optimizer keeps of a parameter's piece; empty where there is none."""
        if self.optimizer is None or index not in self.pieces:
            return {}
        return self.optimizer.state[self.pieces[index].leaf]

    @torch.no_grad()
    def step(
        self, gradients: Mapping[int, Tensor], options: Sequence[Options], *, number: int
    ) -> None:
        """Step number ``number`` of the pieces that have a gradient."""
        if self.optimizer is None:
            return
        for group, index in zip(self.optimizer.param_groups, self._kept, strict=True):
            group.update(options[index])
        stepped = [(piece, gradients[i]) for i, piece in self.pieces.items() if i in gradients]
        for piece, gradient in stepped:
            piece.begin()
            piece.leaf.grad = gradient.to(piece.leaf.dtype)
        self.optimizer.step()
        for piece, _ in stepped:
            piece.leaf.grad = None
            piece.finish(number)
            piece.rest()

    def places(self) -> list[Place]:
        """Where the master copies and the optimizer's values for each element are kept."""
        found = []
        for index, piece in self.pieces.items():
            if isinstance(piece, MasterPiece):
                put = partial(setattr, piece.leaf, "data")
                found.append(Place((index, ""), piece.leaf.data, put))
            state = self.state_of(index)
            for field in self._kept[self._homes[index]].fields:
                if field.elements and state.get(field.name) is not None:
                    put = partial(state.__setitem__, field.name)
                    found.append(Place((index, field.name), state[field.name], put))
        return found
