"""A folder of a model in the making: which file holds what, and the tensors as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.export.dtypes import Dtypes, dtype_of
from megablocks_core.export.joining import Joined, NamedBox
from megablocks_core.export.layout import Layout, Rule, Shapes
from megablocks_core.export.operations import Box
from megablocks_core.export.slabs import slabs
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


class Slab(NamedTuple):
    """What is written at a time: a box of a tensor of the files, and its size there."""

    name: str
    box: Box
    nbytes: int
    joined: Joined


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
        self._rules = {name: rule for rule in layout.rules for name in rule.theirs}
        self._files = _split(wholes, max_file_bytes)
        self._waiting = list(self._files)[rank::num_ranks]
        self._dtypes = {whole.name: whole.dtype for whole in wholes}
        self._num_ranks = num_ranks
        self.staging: Path | None = None
        self._folder: NewFolder | None = None
        self._writer: SafetensorsWriter | None = None

    def wanted(self) -> dict[int, Iterator[tuple[Slab, list[NamedBox]]]]:
        """By rank the slabs of its files, in order, each with the boxes of ours that it needs."""
        return {rank: self._slabs(rank) for rank in range(self._num_ranks)}

    def _slabs(self, rank: int) -> Iterator[tuple[Slab, list[NamedBox]]]:
        made: tuple[Rule, Joined] | None = None
        for file in list(self._files)[rank :: self._num_ranks]:
            for name, shape, dtype in self._files[file]:
                rule = self._rules[name]
                if made is None or made[0] is not rule:  # one rule may make many
                    made = rule, Joined(rule)
                joined = made[1]
                for box in slabs(shape, dtype):
                    size = prod(part.stop - part.start for part in box) * dtype.itemsize
                    yield Slab(name, box, size, joined), joined.needs(name, box)

    def open(self) -> None:
        """Make the folder.

        Raises:
            ValueError: The target is not empty.
        """
        self._folder = NewFolder(self._target)
        self.staging = self._folder.staging

    def add(self, slab: Slab, values: Sequence[Tensor]) -> None:
        """Write the next slab of this rank's files, of the values of the boxes that it needs."""
        assert self.staging is not None
        if self._writer is None:
            file = self._waiting.pop(0)
            path = self.staging / file
            self._writer = SafetensorsWriter(path, self._files[file], metadata={"format": "pt"})
        name, box, _, joined = slab
        made = joined.made(name, box, values)
        self._writer.write(name, _converted(name, made, self._dtypes[name]))
        if self._writer.is_complete:
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
