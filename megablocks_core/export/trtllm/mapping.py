"""Which rank of a TensorRT-LLM model has which layers, heads and experts: arithmetic alone.

Rank ``pp_rank * tp + tp_rank`` has one stage of the layers and one slice of these. Layers are cut
as by ``torch.tensor_split``: the first stages have one more where they do not divide. Of the
``tp`` ranks of a stage, neighbours have other experts (``moe_ep``), and others of them slices of
the same (``moe_tp``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Mapping:
    """The ranks of a model.

    Attributes:
        tp: How many slices heads and feed-forward layers have.
        pp: How many stages the layers have.
        moe_tp: How many slices an expert has; ``None``: as many as leaves no rank without experts.
        moe_ep: How many ranks the experts are dealt to; ``moe_tp * moe_ep`` is ``tp``.

    Raises:
        ValueError: A number is none above 0, or ``moe_tp * moe_ep`` is not ``tp``.
    """

    tp: int = 1
    pp: int = 1
    moe_tp: int | None = None
    moe_ep: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("tp", "pp", "moe_tp", "moe_ep"):
            value = getattr(self, name)
            if not (type(value) is int and value > 0 or name == "moe_tp" and value is None):
                raise ValueError(f"{name}={value!r} must be a whole number above 0")
        given = self.moe_tp if self.moe_tp is not None else max(1, self.tp // self.moe_ep)
        if given * self.moe_ep != self.tp:
            raise ValueError(
                f"moe_tp={self.moe_tp} times moe_ep={self.moe_ep} must be tp={self.tp}"
            )
        object.__setattr__(self, "moe_tp", given)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tp * self.pp

    @property
    def places(self) -> list[Place]:
        """Where each rank stands, in order."""
        return [
            Place(pp_rank * self.tp + tp_rank, tp_rank, pp_rank, self)
            for pp_rank in range(self.pp)
            for tp_rank in range(self.tp)
        ]


class Place(NamedTuple):
    """One rank's place in a mapping."""

    rank: int
    tp_rank: int
    pp_rank: int
    mapping: Mapping

    @property
    def is_first(self) -> bool:
        """Whether it has the embeddings."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the last norm and the head."""
        return self.pp_rank == self.mapping.pp - 1

    @property
    def moe_tp_rank(self) -> int:
        """Which slice of an expert it has."""
        return self.tp_rank // self.mapping.moe_ep

    def layers(self, count: int) -> range:
        """Its layers, of ``count``."""
        each, more = divmod(count, self.mapping.pp)
        first = self.pp_rank * each + min(self.pp_rank, more)
        return range(first, first + each + (self.pp_rank < more))

    def experts(self, count: int) -> range:
        """Its experts, of ``count``."""
        each = count // self.mapping.moe_ep
        first = self.tp_rank % self.mapping.moe_ep * each
        return range(first, first + each)
