"""An optimizer's state for one range of a parameter, by field: to save it, and to fill it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megablocks_core.parallel.published import Field
from megablocks_core.parallel.sharded_optimizer.elementwise import Kept
from megablocks_core.parallel.sharded_optimizer.pieces import MasterPiece, Piece

_MASTER, _STARTED = "master", "started"


class PieceState:
    """What is kept for a piece: its master copy, the optimizer's fields, and whether it has any.

    An optimizer makes most of its state at a parameter's first step. Before that, memory stands
    in for it here, so that a checkpoint has something to fill.

    Args:
        piece: The range.
        state: The optimizer's own state of it, which ``take_over`` sets.
        kept: What the optimizer keeps.

    Attributes:
        tensors: By field. Those with a value for each element have one dimension.
    """

    def __init__(self, piece: Piece, state: dict[str, Any], kept: Kept) -> None:
        self.piece, self._state, self._kept = piece, state, kept
        self.tensors: dict[str, Tensor] = {}
        if isinstance(piece, MasterPiece):
            self.tensors[_MASTER] = piece.leaf
        for field in kept.fields:
            value = state.get(field.name)
            shape = (len(piece.weight),) if field.elements else ()
            if isinstance(value, Tensor):
                self.tensors[field.name] = value.view(shape)
            else:
                number = 0 if value is None else value
                device = torch.device("cpu") if field.on_host else piece.leaf.device
                memory = torch.full(shape, number, dtype=field.dtype, device=device)
                self.tensors[field.name] = memory
        if kept.fields:
            self.tensors[_STARTED] = torch.tensor(int(self.started))

    @property
    def started(self) -> bool:
        """Whether the optimizer has any state of the piece."""
        return any(value is not None for value in self._state.values())

    def fields(self) -> list[Field]:
        """(parameter, field, tensor, range) of what there is, as checkpoints take it."""
        there = self.started or self._kept.at_once
        return [field for field in self.targets() if field[1] == _MASTER or there]

    def targets(self) -> list[Field]:
        """The same of what there may be."""
        whole = (self.piece.start, self.piece.stop)
        return [
            (self.piece.parameter, name, tensor, whole if tensor.dim() else None)
            for name, tensor in self.tensors.items()
            if name != _STARTED
        ]

    def take_over(self, filled: Iterable[str] | None = None) -> None:
        """The tensors were filled, all or those named: they are the optimizer's state now."""
        if not self._kept.fields:
            return
        if filled is not None:
            self.tensors[_STARTED].fill_(bool(set(filled) - {_MASTER}))
        if not self.tensors[_STARTED] and not self._kept.at_once:
            self._state.clear()
            return
        for field in self._kept.fields:
            tensor = self.tensors[field.name]
            if field.kind is not None:
                self._state[field.name] = field.kind(tensor.item())
            elif self._state.get(field.name) is None:
                self._state[field.name] = tensor


def load_states(
    states: Mapping[int, PieceState],
    saved: Mapping[int, Mapping[str, Tensor]],
    ranges: Mapping[int, Sequence[int]],
) -> None:
    """Copy what ``state_dict`` gave into the states, which take it over.

    Args:
        states: By the parameter's index.
        saved: The tensors of each.
        ranges: The range of each that was saved.

    Raises:
        ValueError: It is of other ranges or fields; nothing was changed.
    """
    mine = {index: [state.piece.start, state.piece.stop] for index, state in states.items()}
    if {index: list(whole) for index, whole in ranges.items()} != mine:
        raise ValueError(
            "state_dict must be of this rank in the same layout: its ranges of parameters are "
            "others (ckpt.save and ckpt.load serve any layout)"
        )
    for index, state in states.items():
        if set(saved[index]) != set(state.tensors):
            raise ValueError(
                f"state_dict of parameter {index} has {sorted(saved[index])} and must have "
                f"{sorted(state.tensors)}"
            )
    for index, state in states.items():
        for name, tensor in state.tensors.items():
            tensor.copy_(saved[index][name])
        state.take_over()


def without_members(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, JSON if they can be."""
    values = {}
    for key, value in without_members(group).items():
        value = value.item() if isinstance(value, Tensor) else value
        values[key] = list(value) if isinstance(value, tuple) else value
    return values


def words_of_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The plain options of all parameter groups in words, which ranks compare."""
    return {
        f"{key} of parameter group {number}": repr(value)
        for number, group in enumerate(groups)
        for key, value in plain_options(group).items()
        if value is None or isinstance(value, bool | int | float | str | list)
    }


def check_options(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless saved options are of as many parameter groups.

    Raises:
        ValueError: They are not.
    """
    if len(groups) != len(saved):
        raise ValueError(
            f"a state of {len(saved)} parameter groups must have {len(groups)}, as the optimizer"
        )


def set_options(
    groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any] | None]
) -> None:
    """Give each parameter group its saved options, if it has any."""
    for group, options in zip(groups, saved, strict=True):
        for key, value in (options or {}).items():
            now = group.get(key)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value
