"""Write a checkpoint as torch's DCP does, with its own writer, a slab of a tensor at a time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megablocks_core.ckpt.places.places import is_url
from megablocks_core.ckpt.plans.boxes import lengths
from megablocks_core.ckpt.tools.checkpoint import Checkpoint
from megablocks_core.files import NewFolder
from megablocks_core.files.progress import Progress


def write_dcp(path: str | os.PathLike[str], checkpoint: Checkpoint, *, progress: Progress) -> None:
    """Write ``checkpoint`` as the DCP checkpoint ``path``; it appears whole or not at all.

    Raises:
        ValueError: ``path`` is a URL or not empty, or two tensors would have one name.
        OSError: A fault of the file system.
    """
    if is_url(path):
        raise ValueError(
            f"path={str(path)!r} must be a folder of this machine for a DCP checkpoint"
        )
    nested, names = _state_dict(checkpoint)
    folder = NewFolder(Path(path).absolute())
    try:
        planner = _Planner(checkpoint, names, progress)
        # Nothing is copied ahead, so that one slab at a time is in memory.
        writer = FileSystemWriter(folder.staging, per_thread_copy_ahead=0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(nested, storage_writer=writer, planner=planner, no_dist=True)
        folder.publish()
    except CheckpointException as error:  # no Exception; it holds the cause
        cause, _ = next(iter(error.failures.values()))
        raise cause from error
    finally:
        folder.discard()
        progress.close()


class _Planner(DefaultSavePlanner):
    """Plans slabs for the tensors of a state dict on "meta", and reads each when it is due.

    Args:
        checkpoint: Where the values are.
        names: The name in ``checkpoint`` of each tensor of the state dict, by ``id``.
        progress: Told of each slab.
    """

    def __init__(self, checkpoint: Checkpoint, names: dict[int, str], progress: Progress) -> None:
        super().__init__()
        self._checkpoint, self._names, self._progress = checkpoint, names, progress
        self._written = torch.empty(0)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state dict; empty dicts, which torch leaves out, are kept."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        for path in _empty_dicts(state_dict):
            key = ".".join(map(str, path))
            self.state_dict[key] = {}
            self.mappings[key] = path

    def create_local_plan(self) -> SavePlan:
        """The plan of the only rank, its tensors cut into slabs."""
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in self._pieces(item)]
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The values of an item."""
        if write_item.tensor_data is None:
            return super().resolve_data(write_item)
        # The writer holds on to every tensor until its file is closed: its memory is taken back.
        self._written.untyped_storage().resize_(0)
        chunk = write_item.tensor_data.chunk
        ends = zip(chunk.offsets, chunk.sizes, strict=True)
        box = tuple(slice(start, start + length) for start, length in ends)
        self._written = self._checkpoint.read(self._name(write_item), box).clone()
        self._progress.add(self._written.nbytes)
        return self._written

    def _name(self, item: WriteItem) -> str:
        return self._names[id(self.state_dict[item.index.fqn])]

    def _pieces(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if data is None:
            return [item]
        pieces = []
        for box in self._checkpoint.tensors[self._name(item)].slabs():
            start = torch.Size(part.start for part in box)
            chunk = ChunkStorageMetadata(start, torch.Size(lengths(box)))
            pieces.append(
                replace(
                    item,
                    index=MetadataIndex(item.index.fqn, start),
                    type=WriteItemType.SHARD,
                    tensor_data=replace(data, chunk=chunk),
                )
            )
        return pieces


def _empty_dicts(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the empty dicts in nested dicts and lists are."""
    if value == {}:
        yield path
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _empty_dicts(item, (*path, key))


def _state_dict(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[int, str]]:
    """The nested state dict, its tensors on "meta", and the name of each by ``id``."""
    names: dict[int, str] = {}
    entries: dict[str, Any] = {}
    for entry, said in checkpoint.state.items():
        held = {
            name.partition("/")[2]: _placeholder(checkpoint, name, names)
            for name in checkpoint.tensors
            if name.partition("/")[0] == entry
        }
        if said["kind"] == "json":
            entries[entry] = said["value"]
        elif said["kind"] == "optimizer":
            entries[entry] = _optimizer(entry, said["value"], held)
        else:
            entries[entry] = held if said["kind"] == "module" else held[entry]
    return entries, names


def _placeholder(checkpoint: Checkpoint, name: str, names: dict[int, str]) -> Tensor:
    held = checkpoint.tensors[name]
    tensor = torch.empty(held.shape, dtype=held.dtype, device="meta")
    names[id(tensor)] = name
    return tensor


def _optimizer(entry: str, value: dict[str, Any], held: dict[str, Tensor]) -> dict[str, Any]:
    """An optimizer's state dict by parameter name, as ``get_optimizer_state_dict`` gives it."""
    state: dict[str, dict[str, Any]] = {}
    owners: dict[str, str] = {}
    groups = [
        {"params": [_parameter(name) for name in group["names"]], **_hyperparameters(group)}
        for group in value.get("param_groups", [])
    ]
    for key, tensor in held.items():
        owner, _, field = key.rpartition("/")
        if owner.startswith("param_groups.") and "/" not in owner:
            number = owner.partition(".")[2]
            if not number.isdecimal() or int(number) >= len(groups):
                raise ValueError(f"{entry}/{key} is of no parameter group of {len(groups)}")
            groups[int(number)][field] = tensor
            continue
        parameter = _parameter(owner)
        if owners.setdefault(parameter, owner) != owner:
            raise ValueError(
                f"{entry} has state of {owner!r} and {owners[parameter]!r}, which torch's DCP "
                "would give one name"
            )
        state.setdefault(parameter, {})[field] = tensor
    for owner, numbers in value.get("state", {}).items():
        state.setdefault(_parameter(owner), {}).update(numbers)
    if "values" in value:
        return {"state": state, "values": value["values"]}
    return {"state": state, "param_groups": groups}


def _parameter(owner: str) -> str:
    """A parameter's name without its module's entry."""
    return owner.partition("/")[2]


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    values = dict(group["values"])
    if isinstance(values.get("betas"), list):  # torch's own form
        values["betas"] = tuple(values["betas"])
    return values
