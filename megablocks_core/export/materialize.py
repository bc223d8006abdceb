"""Give memory to a model that was built on ``meta``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Table(NamedTuple):
    """Values of a buffer that no checkpoint holds."""

    owner: nn.Module
    name: str
    values: Tensor


def computed_tables(module: nn.Module, device: torch.device) -> list[Table]:
    """Values of all meta buffers that no checkpoint holds, such as rotary tables.

    They are computed by the method that transformers' models have for it, ``_init_weights``
    of the model that the buffer's module is part of. ``module`` stays as it is.

    Raises:
        ValueError: Buffers whose values cannot be had, by name; or there are tensors on meta, and
            ``device`` is meta too.
    """
    parts = dict(module.named_modules())
    if device.type == "meta" and any(_on_meta(part) for part in parts.values()):
        raise ValueError(f"device={device!r} must have memory, for the model is on meta")
    found, unknown = [], []
    for path, owner in parts.items():
        names = [
            name
            for name, buffer in owner._buffers.items()
            if buffer is not None and buffer.is_meta and name in owner._non_persistent_buffers_set
        ]
        if names:
            values = _computed(owner, names, _model_of(path, parts), device)
            found += [Table(owner, name, values[name]) for name in names if name in values]
            unknown += [f"{path}.{name}".lstrip(".") for name in names if name not in values]
    if unknown:
        raise ValueError(
            f"buffers {unknown} are on meta and in no checkpoint: build the modules that hold "
            "them with memory"
        )
    return found


def materialize(module: nn.Module, tables: list[Table], device: torch.device) -> None:
    """Replace every meta tensor: by ``tables``, or by memory without values; ties stay ties."""
    for owner, name, values in tables:
        owner._buffers[name] = values
    made: dict[int, Tensor] = {}
    for owner in module.modules():
        held: dict[str, Any]
        for held in (owner._parameters, owner._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = _with_memory(tensor, device)
                    held[name] = made[id(tensor)]


def _on_meta(module: nn.Module) -> bool:
    """Whether a tensor of ``module``, not of its parts, is on meta."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(memory, requires_grad=tensor.requires_grad)
    return memory


def _model_of(path: str, parts: dict[str, nn.Module]) -> Any:
    """The nearest module at or above ``path`` that knows how to compute values."""
    while not hasattr(parts[path], "_init_weights"):
        if not path:
            return None
        path = path.rpartition(".")[0]
    return parts[path]


@torch.no_grad()
def _computed(
    owner: nn.Module, names: list[str], model: Any, device: torch.device
) -> dict[str, Tensor]:
    """Values of those buffers that ``model`` fills: it is given NaN, and must leave none."""
    if model is None or not all(parameter.is_meta for parameter in owner.parameters()):
        return {}
    before: dict[str, Any] = dict(owner._buffers)
    values = {
        name: torch.full_like(before[name], torch.nan, device=device)
        for name in names
        if before[name].is_floating_point()
    }
    try:
        owner._buffers.update(values)
        model._init_weights(owner)
    finally:
        owner._buffers.update(before)
    return {name: value for name, value in values.items() if not value.isnan().any()}
