"""A folder of a model in the making: which file holds what, and the tensors as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megablocks_core.export.dtypes import Dtypes, dtype_of
from megablocks_core.export.joining import Joiner
from megablocks_core.export.layout import Layout, Shapes
from megablocks_core.export.source import INDEX, SINGLE
from megablocks_core.export.verifying import check_schema
from megablocks_core.files import NewFolder, create_file
from megablocks_core.files.safetensors import SafetensorsWriter
from megablocks_core.groups import Whole

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


def planned(wholes: list[Whole], layout: Layout, dtypes: Dtypes) -> list[Whole]:
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
        Whole(name, shape, dtype_of(name, whole.dtype, dtypes))
        for whole in wholes
        if last[id(rule := owners[whole.name])] is whole
        for name, shape in rule.theirs.items()
    ]


def name_dtype(config: dict[str, Any], wholes: list[Whole]) -> None:
    """Say in the config what most values are written as; transformers 4 reads the old key."""
    sizes: dict[str, int] = {}
    for whole in wholes:
        name = str(whole.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + whole.nbytes
    config["dtype"] = config["torch_dtype"] = max(sizes, key=lambda name: sizes[name])


class HfDraft:
    """The folder in the making, on one of the ranks that write; files go to these in turn.

    Args:
        target: Where it will appear: new, or empty.
        wholes: Its tensors, as ``planned`` gives them.
        layout: Says of which of ours each is made.
        max_file_bytes: A file is closed before it grows beyond this.
        rank: This one of those that write; the first makes the folder and lets it appear.
        num_ranks: How many write.

    Attributes:
        owners: By name of ours, the ranks whose files have a part of it.
        staging: Where the files are until then; known once the folder is made.
    """

    def __init__(
        self,
        target: Path,
        wholes: list[Whole],
        layout: Layout,
        max_file_bytes: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._target = target
        self._joiner = Joiner(layout.rules)
        self._files = _split(wholes, max_file_bytes)
        self._waiting = list(self._files)[rank::num_ranks]
        self._own = {whole.name for file in self._waiting for whole in self._files[file]}
        self._dtypes = {whole.name: whole.dtype for whole in wholes}
        writers = {
            whole.name: number % num_ranks
            for number, members in enumerate(self._files.values())
            for whole in members
        }
        self.owners = {
            ours: sorted({writers[name] for name in rule.theirs})
            for rule in layout.rules
            for ours in rule.ours
        }
        self.staging: Path | None = None
        self._folder: NewFolder | None = None
        self._writer: SafetensorsWriter | None = None
        self._left = 0

    def open(self) -> None:
        """Make the folder.

        Raises:
            ValueError: The target is not empty.
        """
        self._folder = NewFolder(self._target)
        self.staging = self._folder.staging

    def add(self, part: str, values: Tensor) -> None:
        """Write what ``part`` completes of this rank's files; parts come in order of the plan."""
        for name, tensor in self._joiner.add(part, values).items():
            if name in self._own:
                self._write(name, tensor)

    def _write(self, name: str, tensor: Tensor) -> None:
        assert self.staging is not None
        if self._writer is None:
            file = self._waiting.pop(0)
            members = self._files[file]
            path = self.staging / file
            self._writer = SafetensorsWriter(path, members, metadata={"format": "pt"})
            self._left = len(members)
        self._writer.add(name, _converted(name, tensor, self._dtypes[name]))
        self._left -= 1
        if self._left == 0:
            self._writer.finish()
            self._writer = None

    def publish(self, config: dict[str, Any], like: Path | None) -> None:
        """Add index, ``config.json`` and the companions in ``like``; let the folder appear.

        Raises:
            OSError: The files of other ranks are not in this rank's folder.
        """
        assert self._folder is not None and not self._waiting
        staging = self._folder.staging
        if missing := [file for file in self._files if not (staging / file).is_file()]:
            raise OSError(f"ranks that write {self._target} must see one folder: no {missing}")
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
