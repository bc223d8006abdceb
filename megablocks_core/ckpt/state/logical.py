"""The protocol by which an optimizer that cuts its state in its own way is saved and loaded.

An optimizer that keeps flat, sharded or bucketed state says, for each tensor it holds, of which
parameter it is and which elements it holds. No name, mark or process group is asked of it: the
modules in ``state`` know those of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class LogicalField(NamedTuple):
    """What an optimizer on this rank holds of one field of one parameter.

    Attributes:
        parameter: The parameter itself, as a module of ``state`` holds it.
        field: Name of the field, such as "exp_avg" or "master".
        tensor: The memory. Without ``flat`` it has the shape of this rank's parameter, or none
            (a number for the whole parameter). With it, it is one-dimensional.
        flat: Elements [start, stop) of this rank's parameter, flattened, that ``tensor`` holds.
            What lies past the parameter's end is padding, neither saved nor loaded. A field may
            come several times, with ranges that do not overlap.
    """

    parameter: Tensor
    field: str
    tensor: Tensor
    flat: tuple[int, int] | None = None


class LogicalGroup(NamedTuple):
    """A parameter group.

    Attributes:
        parameters: Its members.
        options: JSON values that are equal on all ranks: hyperparameters.
    """

    parameters: Sequence[Tensor]
    options: Mapping[str, Any]


class LogicalState(NamedTuple):
    """All that an optimizer on this rank holds.

    Attributes:
        fields: Its tensors; those that ``load`` is to fill must be there before the first step.
        values: JSON values that are equal on all ranks: hyperparameters, counters.
        groups: The parameter groups of a ``TorchLikeOptimizer``.
    """

    fields: list[LogicalField]
    values: Any = None
    groups: Sequence[LogicalGroup] | None = None


@runtime_checkable
class LogicalOptimizer(Protocol):
    """An optimizer that publishes its state by parameter."""

    def logical_state(self) -> LogicalState:
        """Its tensors, which ``load`` fills in place, and its values."""
        ...

    def load_logical_values(self, values: Any) -> None:
        """Take over saved values; called after all tensors were filled."""
        ...


@runtime_checkable
class TorchLikeOptimizer(LogicalOptimizer, Protocol):
    """An optimizer that keeps what a torch optimizer keeps: each loads what the other saved.

    Its fields have the names and shapes of torch's, and are there once a parameter was stepped.
    One named "master" is a copy of the weights of higher precision, which torch's do not want.
    """

    def logical_targets(self) -> list[LogicalField]:
        """Memory for each field that may be stored; what is not stored stays as it is."""
        ...

    def load_logical_groups(
        self, options: Sequence[Mapping[str, Any] | None], filled: Sequence[bool]
    ) -> None:
        """Take over the saved options of each parameter group, and the targets that were filled.

        Called before ``load_logical_values``, which gets ``None`` from a torch optimizer.
        """
        ...
