"""What an optimizer or an average publishes of itself, as ``ckpt`` saves and loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megablocks_core.groups.placements import is_dtensor

Field = tuple[Tensor, str, Tensor, tuple[int, int] | None]


class Published(NamedTuple):
    """A state by parameter.

    Attributes:
        fields: (parameter, field, tensor, range). Without a range the tensor is cut as the
            parameter is, or is a number; with one it holds those elements of the parameter.
        values: JSON, equal on all ranks.
        groups: Of what keeps a torch optimizer's state, the members and the options (JSON) of
            each parameter group.
    """

    fields: list[Field]
    values: Any = None
    groups: Sequence[tuple[Sequence[Tensor], dict[str, Any]]] | None = None


def cut_alike(memory: Tensor, parameter: Tensor) -> Tensor:
    """``memory``, this rank's share, as a DTensor placed as ``parameter`` is if that is one."""
    if memory.dim() == 0 or not is_dtensor(parameter):
        return memory
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        memory,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
