"""A part: what one rank holds of a state, as a folder, and the parts that lie in a folder.

A part is a checkpoint of one process: a module whose tensors are what the rank holds, box by box,
and a JSON value that says what they are of the state. A copy of a part is equal to it, to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from megablocks_core.ckpt.format.manifest_reading import parse_manifest
from megablocks_core.ckpt.format.stored import check_sizes
from megablocks_core.ckpt.format.writing import FileToWrite, Item
from megablocks_core.ckpt.manifest import (
    DTYPES,
    LAST_TIME,
    MANIFEST,
    CheckpointError,
    Manifest,
    StoredAs,
)
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.plans.boxes import lengths, split
from megablocks_core.ckpt.plans.outlines import Outline
from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.groups.cuts import Box

FILE = "part.safetensors"
# The entries of a part.
_TENSORS, _LAYOUT = "tensors", "layout"
# What is read, sent and written at once; larger boxes are cut.
_ITEM_BYTES = 16 * 2**20
_NAME = re.compile(r"step-(\d+)\.(\d+)\.(\d{5,})-of-(\d{5,})")


class SaveId(NamedTuple):
    """One save, the later ones greater.

    Attributes:
        saved_unix_ns: When, by the first rank's clock; above that of the save before it.
        step: The caller's number.
        num_ranks: How many parts it has.
    """

    saved_unix_ns: int
    step: int
    num_ranks: int


class PartId(NamedTuple):
    """The part of one rank in one save; ``name`` is its folder's."""

    save: SaveId
    rank: int

    @property
    def name(self) -> str:
        """The folder's name, the same for a copy."""
        saved, step, num_ranks = self.save
        return f"step-{step}.{saved}.{self.rank:05}-of-{num_ranks:05}"


class Slice(NamedTuple):
    """A box of what a rank holds of a tensor, and the item of the file that it is."""

    tensor: str
    box: Box
    item: Item

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return torch.Size(self.item.shape).numel() * self.item.dtype.itemsize


class Contents(NamedTuple):
    """What a part holds.

    Attributes:
        state: What the manifest says of each entry.
        outlines: This rank's part of each tensor.
    """

    state: dict[str, dict[str, Any]]
    outlines: list[Outline]

    @classmethod
    def of(cls, state: Mapping[str, Any], path: str) -> Contents:
        """Take apart what ``manifest_state`` put together and was read from ``path``.

        Raises:
            CheckpointError: It says what cannot be.
        """
        try:
            value = state[_LAYOUT]["value"]
            # Read as the state of any manifest is: nothing in it is believed.
            text = Manifest(0, value["state"]).text().encode()
            own = parse_manifest(text, f"{path}: {_LAYOUT}", tensors=False).state
            return cls(own, [_outline(*row) for row in value["outlines"]])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} says what cannot be of its part: {error!r}") from error

    def manifest_state(self) -> dict[str, dict[str, Any]]:
        """What the manifest of the part says of its own entries."""
        rows = [
            [
                one.name,
                DTYPE_CODES[one.dtype],
                list(one.shape),
                [[[part.start, part.stop] for part in box] for box in one.boxes],
            ]
            for one in self.outlines
        ]
        value = {"state": self.state, "outlines": rows}
        return {_TENSORS: {"kind": "module"}, _LAYOUT: {"kind": "json", "value": value}}

    def wholes(self, saved_unix_ns: int) -> Manifest:
        """The manifest of a checkpoint of the whole tensors, without chunks."""
        tensors = {
            one.name: StoredAs(DTYPE_CODES[one.dtype], one.shape, []) for one in self.outlines
        }
        return Manifest(saved_unix_ns, self.state, tensors)

    def slices(self) -> list[Slice]:
        """What the file holds, in order: widest dtype first."""
        found = []
        for one in sorted(self.outlines, key=lambda one: -one.dtype.itemsize):
            most = max(_ITEM_BYTES // one.dtype.itemsize, 1)
            boxes = [part for box in one.boxes for part in split(box, most)]
            for number, box in enumerate(boxes):
                key, shape = f"{one.name}#{number}", lengths(box)
                item = Item(key, f"{_TENSORS}/{key}", one.dtype, (0,) * len(shape), shape, shape)
                found.append(Slice(one.name, box, item))
        return found


def file_of(slices: Sequence[Slice]) -> FileToWrite:
    """The one file of a part."""
    return FileToWrite(FILE, [one.item for one in slices])


def batches(slices: Sequence[Slice], limit: int) -> list[list[Slice]]:
    """What is sent at once: at most ``limit`` bytes, or one slice."""
    found: list[list[Slice]] = []
    room = 0
    for one in slices:
        if not found or one.nbytes > room:
            found.append([])
            room = limit
        found[-1].append(one)
        room -= one.nbytes
    return found


class Survey(NamedTuple):
    """What lies in a folder.

    Attributes:
        parts: The text of the manifest of each whole part.
        faults: What there is to say of others.
    """

    parts: dict[PartId, bytes]
    faults: list[str]


def survey(folder: LocalPlace) -> Survey:
    """The parts in a folder whose manifests are intact and whose files have their sizes."""
    found, faults = {}, []
    for part in _part_ids(folder.names()[0]):
        place = folder.child(part.name)
        try:
            text = place.read(MANIFEST)
            if text is None:
                raise CheckpointError(f"{place} has no {MANIFEST}")
            manifest = parse_manifest(text, str(place.child(MANIFEST)), tensors=False)
            check_sizes(place, manifest)
            found[part] = text
        except (CheckpointError, OSError) as error:
            faults.append(f"passing over {place}: {error}")
    return Survey(found, faults)


def complete_saves(held: Sequence[Iterable[PartId]]) -> list[SaveId]:
    """The saves of which every part lies in some folder, newest first."""
    ranks: dict[SaveId, set[int]] = {}
    for parts in held:
        for save, rank in parts:
            ranks.setdefault(save, set()).add(rank)
    return sorted(
        (save for save, found in ranks.items() if found >= set(range(save.num_ranks))), reverse=True
    )


def remove_leftovers(folder: LocalPlace) -> None:
    """Delete what killed saves and removals left; no save may be going on in the folder."""
    for name in folder.leftovers():
        if _NAME.match(name.removeprefix(".")):
            _remove(folder, name)


def remove_others(folder: LocalPlace, kept: Sequence[SaveId]) -> None:
    """Delete the parts of all saves but ``kept``."""
    for part in _part_ids(folder.names()[0]):
        if part.save not in kept:
            _remove(folder, part.name)


def _remove(folder: LocalPlace, name: str) -> None:
    with suppress(FileNotFoundError):  # another rank of this host was faster
        folder.remove(name)


def _part_ids(names: Sequence[str]) -> Iterator[PartId]:
    for name in names:
        if match := _NAME.fullmatch(name):
            step, saved, rank, num_ranks = map(int, match.groups())
            if saved > LAST_TIME:
                continue
            yield PartId(SaveId(saved, step, num_ranks), rank)


def _outline(name: str, code: str, shape: list[int], boxes: list[Any]) -> Outline:
    if code not in DTYPES:
        raise ValueError(f"dtype {code!r} is unknown")
    found = [tuple(slice(int(start), int(stop)) for start, stop in box) for box in boxes]
    return Outline(name, DTYPES[code], tuple(map(int, shape)), found)
