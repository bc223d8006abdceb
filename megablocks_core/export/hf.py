"""Load and save the weights of a model in Hugging Face's format, at any layout."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.export.families import FAMILIES, family_of
from megablocks_core.export.layout import Layout, Shapes
from megablocks_core.export.materialize import computed_tables, materialize
from megablocks_core.export.parts import Joiner
from megablocks_core.export.source import INDEX, SINGLE, HfFolder
from megablocks_core.files import NewFolder, create_file, read_json
from megablocks_core.files.safetensors import SafetensorsWriter
from megablocks_core.groups import (
    LOCAL,
    Collection,
    Group,
    Held,
    Specs,
    Whole,
    load_slices,
    logical_shape,
    logical_tensors,
    together,
)
from megablocks_core.groups.stacks import Stack, separate_names

# What belongs to a model beside its weights, copied by ``like=``.
_COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_FLOATS = ("BF16", "F16", "F32", "F64")


def load_hf(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    group: Group = LOCAL,
    device: torch.device | str | None = None,
) -> None:
    """Fill ``model``, at any layout, from a Hugging Face folder.

    Every rank reads its own slices. Values are cast to the dtype of the model's tensors.
    What is on ``meta`` gets memory; buffers that no checkpoint holds (rotary tables of
    transformers' modules) are computed again. Sends two small messages.

    Args:
        model: A ``Decoder``, or any module whose names are Hugging Face's, such as a
            transformers model cut by ``tensor_parallelize``.
        path: A folder with ``config.json`` and safetensors, in one file or with an index.
        group: All ranks that load; over ``LOCAL`` each reads for itself.
        device: Where what is on ``meta`` gets memory; default torch's default device.

    Raises:
        ValueError: The folder is not whole, a tensor on either side has no partner or another
            shape, or a buffer on ``meta`` cannot be computed; nothing was changed.
        RuntimeError: Another rank failed while reading.
    """
    folder = Path(path)
    place = torch.get_default_device() if device is None else torch.device(device)
    task = f"load_hf({str(folder)!r})"
    with together(task, group=group):
        source = HfFolder(folder)
        plan = _partners(model, source)
        tables = computed_tables(model, place)
    with together(task, group=group):
        materialize(model, tables, place)
        filled: set[int] = set()
        for name, tensor, specs in logical_tensors(model):
            if name in plan and id(tensor) not in filled:
                filled.add(id(tensor))
                load_slices(tensor, specs, plan[name])


def save_hf(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    group: Group = LOCAL,
    dtype: torch.dtype | None = None,
    like: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 5 * 2**30,
) -> None:
    """Write ``model``, from any layout, as a folder that transformers opens.

    The first rank of ``group`` writes; the others send it their slices, a bounded bucket at
    a time. The folder appears whole or not at all.

    Args:
        model: A model of a family in ``families.FAMILIES``.
        path: The folder: new, or empty.
        group: All ranks that hold a part of the model.
        dtype: Of all floating-point tensors; default each tensor's own.
        like: A folder whose ``config.json`` is taken, and whose tokenizer files are copied.
            Without it the config is ``model.spec.to_hf()`` or that of a transformers model.
        max_file_bytes: A file is closed before it grows beyond this.

    Raises:
        ValueError: ``path`` is not empty, the family is unknown, tensors are not those that
            the config describes, or a value does not fit ``dtype``.
        RuntimeError: Another rank failed.
        OSError: The disk is full, or another fault of the file system.
    """
    target = Path(path).absolute()
    task = f"save_hf({str(target)!r})"
    with together(task, group=group):
        config = _config(model, like)
        held = [
            Held(name, tensor, specs)
            for name, tensor, specs in logical_tensors(model, remove_duplicate=True, unstack=True)
        ]
        names = [
            part
            for name, tensor, specs in logical_tensors(model, remove_duplicate=True)
            for part in _parts(name, tensor, specs)
        ]
        layout = _layout(config).named(names)
    collection = Collection(held, group=group, task=task, raises=RuntimeError, order=names)
    wholes = _joined(collection.wholes, layout, dtype)
    _name_dtype(config, wholes)
    draft = _Draft(target, wholes, layout, max_file_bytes)
    try:
        with together(task, group=group):
            if group.rank == 0:
                draft.open()
        collection.visit(draft.add)
        with together(task, group=group):
            if group.rank == 0:
                draft.publish(config, None if like is None else Path(like))
    finally:
        draft.close()


def verify(path: str | os.PathLike[str]) -> None:
    """Check that a folder's files are whole and hold what its ``config.json`` describes.

    Reads headers only; values are not looked at.

    Raises:
        ValueError: What is wrong, by name.
    """
    source = HfFolder(Path(path))
    layout = _layout(source.config)
    shapes = {name: source.shape(name) for name in source.tensors if not layout.ignores(name)}
    schema = layout.schema
    for name, twin in layout.ties.items():
        if name not in schema and shapes.get(name) == schema[twin]:
            del shapes[name]  # written although tied, as old checkpoints do
    _check_schema(shapes, schema)
    strange = [name for name in shapes if source.tensors[name].get_dtype() not in _FLOATS]
    if strange:
        raise ValueError(f"{path}: {strange} must have one of the dtypes {', '.join(_FLOATS)}")


def _partners(model: nn.Module, source: HfFolder) -> dict[str, Any]:
    """For each logical name of ``model`` the lazy slice of the folder that it is filled from.

    Both sides are covered or it raises.
    """
    wanted = list(logical_tensors(model))
    parts = {name: _parts(name, tensor, specs) for name, tensor, specs in wanted}
    known = [part for own in parts.values() for part in own]
    on_disk = source.parts(known)
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
    used = {disk[0] for held in found.values() for disk in held.values() if disk}
    unused = sorted({name for name, _ in on_disk.values()} - used)
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
    stacked = {name for name, _, specs in wanted if specs.each is not None}
    return {name: _source(disk, stacked=name in stacked) for name, disk in plan.items()}


def _source(held: Mapping[str, tuple[str, Any]], *, stacked: bool) -> Any:
    """The one tensor as a lazy slice, or all of them, of one shape, as their stack."""
    slices = {name: whole for name, (_, whole) in held.items()}
    return Stack(slices, list(slices)) if stacked else next(iter(slices.values()))


def _parts(name: str, tensor: Tensor, specs: Specs) -> list[str]:
    """The logical names under which files hold a tensor: one, or those that it stacks."""
    if specs.each is None:
        return [name]
    return separate_names(name, specs.each, logical_shape(tensor, specs)[0])


def _misfits(tensor: Tensor, specs: Specs, held: Mapping[str, tuple[str, Any]]) -> list[str]:
    want, faults = logical_shape(tensor, specs), []
    if specs.each is not None:
        want = want[1:]
    for part, (_, whole) in held.items():
        have, code = tuple(whole.get_shape()), whole.get_dtype()
        if want != have:
            faults.append(f"{part} has shape {want}, on disk {have}")
        if tensor.is_floating_point() != (code in _FLOATS):
            faults.append(f"{part} is {tensor.dtype}, which {code} on disk cannot be cast to")
    return faults


def _untrue_ties(
    wanted: list[tuple[str, Tensor, Specs]],
    plan: Mapping[str, Mapping[str, tuple[str, Any]]],
    ties: Mapping[str, str],
) -> list[str]:
    """Tensors that the model or the config ties and that differ on disk."""
    first: dict[int, str] = {}
    pairs = [(plan[a], plan[b]) for a, b in ties.items() if a in plan and b in plan]
    for name, tensor, _ in wanted:
        if name in plan:
            pairs.append((plan[name], plan[first.setdefault(id(tensor), name)]))
    return [
        f"{a} and {b} are tied, but differ on disk"
        for left, right in pairs
        for (a, one), (b, other) in zip(left.values(), right.values(), strict=True)
        if a != b and not torch.equal(one[:], other[:])
    ]


def _config(model: nn.Module, like: str | os.PathLike[str] | None) -> dict[str, Any]:
    if like is not None:
        return read_json(Path(like) / "config.json", dict)
    spec: Any = getattr(model, "spec", None)
    if hasattr(spec, "to_hf"):
        return dict(spec.to_hf())
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        return json.loads(config.to_json_string())
    raise ValueError(f"like={like} must be a folder, for the model has no spec or config to write")


def _layout(config: Mapping[str, Any]) -> Layout:
    family = family_of(config)
    if family is None:
        name = config.get("model_type")
        raise ValueError(f"model_type={name!r} must be one of {', '.join(FAMILIES)}")
    if "quantization_config" in config:
        raise ValueError("quantization_config must be absent: quantised folders are not served yet")
    return family.layout(config)


def _joined(wholes: list[Whole], layout: Layout, dtype: torch.dtype | None) -> list[Whole]:
    """The tensors of the files, in the order of their last parts.

    Raises:
        ValueError: The parts are not those that the layout describes.
    """
    owners = {part: tensor for tensor in layout.tensors for part in tensor.parts}
    shapes: Shapes = {}
    for whole in wholes:
        owner = owners.get(whole.name)
        if owner is None or whole.shape != owner.part_shape:
            shapes[whole.name if owner is None else owner.name] = whole.shape
    here = {whole.name for whole in wholes}
    complete = [tensor for tensor in layout.tensors if here.issuperset(tensor.parts)]
    _check_schema({tensor.name: tensor.shape for tensor in complete} | shapes, layout.schema)
    last = {owners[whole.name].name: whole for whole in wholes}
    return [
        Whole(owner.name, owner.shape, _cast_to(whole.dtype, dtype))
        for whole in wholes
        if last[(owner := owners[whole.name]).name] is whole
    ]


def _check_schema(shapes: Shapes, schema: Shapes) -> None:
    """Compare what there is with what the config describes.

    Raises:
        ValueError: Names are missing or left over, or shapes differ.
    """
    faults = []
    if missing := [name for name in schema if name not in shapes]:
        faults.append(f"missing {missing}")
    if unknown := [name for name in shapes if name not in schema]:
        faults.append(f"not described {unknown}")
    faults += [
        f"{name} has shape {shape}, described as {schema[name]}"
        for name, shape in shapes.items()
        if schema.get(name, shape) != shape
    ]
    if faults:
        raise ValueError("tensors must be those that config.json describes: " + "; ".join(faults))


def _cast_to(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and own.is_floating_point else own


def _name_dtype(config: dict[str, Any], wholes: list[Whole]) -> None:
    """Say in the config what most values are written as; transformers 4 reads the old key."""
    sizes: dict[str, int] = {}
    for whole in wholes:
        name = str(whole.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + whole.nbytes
    config["dtype"] = config["torch_dtype"] = max(sizes, key=lambda name: sizes[name])


class _Draft:
    """The folder in the making, on the rank that writes."""

    def __init__(
        self, target: Path, wholes: list[Whole], layout: Layout, max_file_bytes: int
    ) -> None:
        self._target = target
        self._joiner = Joiner(layout.tensors)
        self._files = _split(wholes, max_file_bytes)
        self._waiting = list(self._files)
        self._dtypes = {whole.name: whole.dtype for whole in wholes}
        self._folder: NewFolder | None = None
        self._writer: SafetensorsWriter | None = None
        self._left = 0

    def open(self) -> None:
        self._folder = NewFolder(self._target)

    def add(self, part: str, values: Tensor) -> None:
        """Write the tensor that ``part`` completes."""
        if (joined := self._joiner.add(part, values)) is not None:
            self._write(*joined)

    def _write(self, name: str, tensor: Tensor) -> None:
        assert self._folder is not None
        if self._writer is None:
            file = self._waiting.pop(0)
            members = self._files[file]
            path = self._folder.staging / file
            self._writer = SafetensorsWriter(path, members, metadata={"format": "pt"})
            self._left = len(members)
        self._writer.add(name, _converted(name, tensor, self._dtypes[name]))
        self._left -= 1
        if self._left == 0:
            self._writer.finish()
            self._writer = None

    def publish(self, config: dict[str, Any], like: Path | None) -> None:
        assert self._folder is not None and not self._waiting
        staging = self._folder.staging
        if len(self._files) > 1:
            _write_json(staging / INDEX, _index(self._files))
        _write_json(staging / "config.json", config)
        for name in _COMPANIONS:
            if like is not None and (like / name).is_file():
                create_file(staging / name, (like / name).read_bytes())
        self._folder.publish()

    def close(self) -> None:
        """Close the file; what was not published is deleted."""
        if self._writer is not None:
            self._writer.close()
        if self._folder is not None:
            self._folder.discard()


def _split(wholes: list[Whole], max_file_bytes: int) -> dict[str, list[Whole]]:
    """File names and what goes into each, in order."""
    files: list[list[Whole]] = []
    size = 0
    for whole in wholes:
        if not files or size + whole.nbytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(whole)
        size += whole.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    count = len(files)
    return {
        f"model-{number:05}-of-{count:05}.safetensors": members
        for number, members in enumerate(files, 1)
    }


def _index(files: dict[str, list[Whole]]) -> dict[str, Any]:
    total = sum(whole.nbytes for members in files.values() for whole in members)
    places = {whole.name: file for file, members in files.items() for whole in members}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    create_file(path, (json.dumps(value, indent=2) + "\n").encode())


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if converted.dtype != tensor.dtype and (converted.isfinite() != tensor.isfinite()).any():
        raise ValueError(f"dtype={dtype} must hold the values of {name}: some became infinite")
    return converted
