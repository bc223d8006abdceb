"""Write the weights of a model, from any layout, as a folder in Hugging Face's format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.export.joining import Joiner
from megablocks_core.export.layout import Layout, Shapes
from megablocks_core.export.loading import parts_of
from megablocks_core.export.source import INDEX, SINGLE
from megablocks_core.export.verifying import check_schema, layout_of
from megablocks_core.files import NewFolder, create_file, read_json
from megablocks_core.files.safetensors import SafetensorsWriter
from megablocks_core.groups import LOCAL, Collection, Group, Held, Whole, logical_tensors, together

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
            for part in parts_of(name, tensor, specs)
        ]
        layout = layout_of(config).named(names)
    collection = Collection(held, group=group, task=task, raises=RuntimeError, order=names)
    wholes = _made(collection.wholes, layout, dtype)
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


def _made(wholes: list[Whole], layout: Layout, dtype: torch.dtype | None) -> list[Whole]:
    """The tensors of the files, in the order in which the last of ours for each come.

    Raises:
        ValueError: Ours are not those that the layout describes.
    """
    owners = {name: rule for rule in layout.rules for name in rule.ours}
    shapes: Shapes = {}
    for whole in wholes:
        rule = owners.get(whole.name)
        if rule is None:
            shapes[whole.name] = whole.shape
        elif whole.shape != rule.shapes[whole.name]:
            shapes |= dict.fromkeys(rule.theirs, whole.shape)
    here = {whole.name for whole in wholes}
    complete = [rule for rule in layout.rules if here.issuperset(rule.ours)]
    whole_shapes = {name: shape for rule in complete for name, shape in rule.theirs.items()}
    check_schema(whole_shapes | shapes, layout.schema)
    last = {id(owners[whole.name]): whole for whole in wholes}
    return [
        Whole(name, shape, _cast_to(whole.dtype, dtype))
        for whole in wholes
        if last[id(rule := owners[whole.name])] is whole
        for name, shape in rule.theirs.items()
    ]


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
        self._joiner = Joiner(layout.rules)
        self._files = _split(wholes, max_file_bytes)
        self._waiting = list(self._files)
        self._dtypes = {whole.name: whole.dtype for whole in wholes}
        self._folder: NewFolder | None = None
        self._writer: SafetensorsWriter | None = None
        self._left = 0

    def open(self) -> None:
        self._folder = NewFolder(self._target)

    def add(self, part: str, values: Tensor) -> None:
        """Write the tensors that ``part`` completes."""
        for name, tensor in self._joiner.add(part, values).items():
            self._write(name, tensor)

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
