"""Load the weights of a folder in Hugging Face's format into a model, at any layout."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megablocks_core.export.arguments import check_model, device_of, folder_of
from megablocks_core.export.filling import Piece, fill, pieces
from megablocks_core.export.lazies import Lazy, shape_of
from megablocks_core.export.materialize import computed_tables, materialize
from megablocks_core.export.slabs import are_equal
from megablocks_core.export.source import FLOATS, Found, HfFolder
from megablocks_core.export.vocabulary import padded, part_shapes
from megablocks_core.groups import (
    LOCAL,
    Group,
    Specs,
    interrupts_held,
    logical_shape,
    logical_tensors,
    together,
)
from megablocks_core.groups.stacks import separate_names


def load_hf(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    group: Group = LOCAL,
    device: torch.device | str | None = None,
    allow_nonfinite: bool = False,
    pad_vocab: bool = False,
) -> None:
    """Fill ``model``, at any layout, from a Hugging Face folder.

    Every rank reads its own slices, straight into the memory of tensors on the CPU that have
    the dtype of the files; other values are cast some at a time. What is on ``meta`` gets
    memory; buffers that no checkpoint holds (rotary tables of transformers' modules) are
    computed again. Sends three small messages.

    Args:
        model: A ``Decoder``, or any module whose names are Hugging Face's, such as a
            transformers model cut by ``tensor_parallelize``.
        path: A folder with ``config.json`` and safetensors, in one file or with an index.
        group: All ranks that load; over ``LOCAL`` each reads for itself.
        device: Where what is on ``meta`` gets memory; default torch's default device.
        allow_nonfinite: Whether NaN and infinite values are loaded like others.
        pad_vocab: Whether the model may have more rows for a vocabulary than the folder: further
            ones become zero.

    Raises:
        ValueError: The folder is not whole, a tensor on either side has no partner or another
            shape, or a buffer on ``meta`` cannot be computed; nothing was changed. Or tensors,
            by name, have values that are not finite, or not so in the dtype of the model: they
            are looked at as they are read, so that the model has been filled.
        RuntimeError: Another rank failed while reading; the model may be filled in part.
    """
    task = f"load_hf({str(path)!r})"
    with interrupts_held(group=group):
        with together(task, group=group):
            check_model(model)
            folder, place = folder_of(path), device_of(device)
            source = HfFolder(folder)
            if pad_vocab:
                shapes = part_shapes(model)
                source.layout = padded(source.layout.named(shapes), source.config, shapes)
            plan = _partners(model, source)
            tables = computed_tables(model, place)
        with together(task, group=group):
            materialize(model, tables, place)
            strange = fill(_pieces(model, plan))
        every = group.all_gather_object(strange)
    names = list(dict.fromkeys(name for own in every for name in own))
    if names and not allow_nonfinite:
        raise ValueError(
            f"{folder}: the model has been filled with values that are not finite, "
            f"in {names}; allow_nonfinite=True takes them"
        )


def _pieces(model: nn.Module, plan: Mapping[str, Mapping[str, Lazy]]) -> list[Piece]:
    """What this rank's tensors are filled from, each once."""
    filled: set[int] = set()
    found: list[Piece] = []
    for name, tensor, specs in logical_tensors(model):
        if name in plan and id(tensor) not in filled:
            filled.add(id(tensor))
            found += pieces(tensor, specs, plan[name], stacked=specs.each is not None)
    return found


def parts_of(name: str, tensor: Tensor, specs: Specs) -> list[str]:
    """The logical names under which files hold a tensor: one, or those that it stacks."""
    if specs.each is None:
        return [name]
    return separate_names(name, specs.each, logical_shape(tensor, specs)[0])


def _partners(model: nn.Module, source: HfFolder) -> dict[str, dict[str, Lazy]]:
    """For each logical name of ``model`` what of the folder fills it: one, or all that it stacks.

    Both sides are covered or it raises.
    """
    wanted = list(logical_tensors(model))
    parts = {name: parts_of(name, tensor, specs) for name, tensor, specs in wanted}
    known = [part for own in parts.values() for part in own]
    on_disk = source.found(known)
    ties = source.layout.named(known).tied_parts
    found = {
        name: {part: on_disk.get(part) or on_disk.get(ties.get(part, "")) for part in own}
        for name, own in parts.items()
    }
    whole = {name for name, held in found.items() if all(held.values())}
    served = {id(tensor) for name, tensor, _ in wanted if name in whole}
    missing = [
        part
        for name, tensor, _ in wanted
        if id(tensor) not in served
        for part, disk in found[name].items()
        if not disk
    ]
    used = {one for held in found.values() for disk in held.values() if disk for one in disk.names}
    unused = sorted({one for disk in on_disk.values() for one in disk.names} - used)
    faults = []
    if missing:
        faults.append(f"the folder lacks {missing}")
    if unused:
        faults.append(f"the model lacks {unused}")
    plan = {name: {part: disk for part, disk in found[name].items() if disk} for name in whole}
    for name, tensor, specs in wanted:
        if name in plan:
            faults += _misfits(tensor, specs, plan[name])
    if not faults:
        faults = _untrue_ties(wanted, plan, ties)
    if faults:
        raise ValueError(f"{source.path} does not fit the model: " + "; ".join(faults))
    return {name: {part: one.whole for part, one in disk.items()} for name, disk in plan.items()}


def _misfits(tensor: Tensor, specs: Specs, held: Mapping[str, Found]) -> list[str]:
    want, faults = logical_shape(tensor, specs), []
    if specs.each is not None:
        want = want[1:]
    for part, (_, whole) in held.items():
        have, code = shape_of(whole), whole.get_dtype()
        if want != have:
            faults.append(f"{part} has shape {want}, on disk {have}")
        if tensor.is_floating_point() != (code in FLOATS):
            faults.append(f"{part} is {tensor.dtype}, which {code} on disk cannot be cast to")
    return faults


def _untrue_ties(
    wanted: list[tuple[str, Tensor, Specs]],
    plan: Mapping[str, Mapping[str, Found]],
    ties: Mapping[str, str],
) -> list[str]:
    """Tensors that the model or the config ties and that differ on disk."""
    first: dict[int, str] = {}
    pairs = [(plan[a], plan[b]) for a, b in ties.items() if a in plan and b in plan]
    for name, tensor, _ in wanted:
        if name in plan:
            pairs.append((plan[name], plan[first.setdefault(id(tensor), name)]))
    return [
        f"{', '.join(a)} and {', '.join(b)} are tied, but differ on disk"
        for left, right in pairs
        for (a, one), (b, other) in zip(left.values(), right.values(), strict=True)
        if a != b and not are_equal(one, other)
    ]
