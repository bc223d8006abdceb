"""Which file of a checkpoint holds what, under which key."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megablocks_core.ckpt.arguments import short
from megablocks_core.ckpt.format.writing import FileToWrite, Item
from megablocks_core.ckpt.json_values import check_json
from megablocks_core.ckpt.manifest import MANIFEST
from megablocks_core.ckpt.plans.boxes import lengths
from megablocks_core.ckpt.plans.outlines import Holding
from megablocks_core.ckpt.plans.save_plan import SavePlan

# Plain names for files of any system.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# With what is put behind it, a name of at most 255 bytes, as file systems ask.
LONGEST_NAME = 200
# Entries called so would share files with an entry called what stands before.
NUMBERED = re.compile(r".*(\.\d{5,}|-\d{5,}-of-\d{5,})")


def check_files(files: Any) -> None:
    """Refuse what cannot be written beside the tensors.

    Raises:
        ValueError: It is no mapping of names to JSON values, or a name is no plain file name or
            stands for another file.
    """
    if not isinstance(files, Mapping):
        raise ValueError(f"files={short(files)} must map file names to JSON values")
    for name, value in files.items():
        plain = isinstance(name, str) and FILE_NAME.fullmatch(name)
        if not plain or name == MANIFEST or ".safetensors" in name:
            raise ValueError(
                f"files has {short(name)}, which must be a plain file name, and none of a "
                "checkpoint's own"
            )
        if len(name) > LONGEST_NAME:
            raise ValueError(
                f"files has {short(name)} of {len(name)} letters, must have at most {LONGEST_NAME}"
            )
        check_json(value, f"files[{name!r}]")


def whole_file(entry: str) -> str:
    """The file of an entry's tensors that are brought together, if one rank writes all of them."""
    return f"{entry}.safetensors"


def rank_file(entry: str, rank: int) -> str:
    """The file of what a rank writes as it lies."""
    return f"{entry}.{rank:05}.safetensors"


class FileNames:
    """Names of files.

    Tensors that are brought together lie in "entry.safetensors" or, if several ranks write some,
    in "entry-00001-of-00003.safetensors" and so on, with an index in the form that Hugging Face's
    libraries read. What is written as it lies is in "entry.00005.safetensors", by rank.

    Args:
        homes: For each tensor that is brought together, the rank that writes it.
    """

    def __init__(self, homes: Mapping[str, int]) -> None:
        self._homes = homes
        writers: dict[str, set[int]] = {}
        for name, rank in homes.items():
            writers.setdefault(name.partition("/")[0], set()).add(rank)
        self._writers = {entry: sorted(ranks) for entry, ranks in writers.items()}

    def place(self, name: str) -> tuple[str, str]:
        """(file, key) of a tensor that is brought together."""
        entry, _, key = name.partition("/")
        writers = self._writers[entry]
        if len(writers) == 1:
            return whole_file(entry), key
        number = writers.index(self._homes[name]) + 1
        return f"{entry}-{number:05}-of-{len(writers):05}.safetensors", key

    def files(self, plan: SavePlan, rank: int) -> list[FileToWrite]:
        """The files that a rank writes."""
        items: dict[str, list[Item]] = {}
        for tensor, _ in plan.wholes:
            file, key = self.place(tensor.name)
            start = (0,) * len(tensor.shape)
            item = Item(key, tensor.name, tensor.dtype, start, tensor.shape, tensor.shape)
            items.setdefault(file, []).append(item)
        for (tensor, box), (file, key) in zip(plan.pieces, self.keys(plan, rank), strict=True):
            start = tuple(part.start for part in box)
            item = Item(key, tensor.name, tensor.dtype, start, lengths(box), tensor.shape)
            items.setdefault(file, []).append(item)
        return [FileToWrite(file, held) for file, held in items.items()]

    def beside(self, files: Mapping[str, Any], tensors: Sequence[Holding]) -> dict[str, bytes]:
        """What stands beside the tensors: the caller's JSON values, and indexes.

        Raises:
            ValueError: ``files`` cannot be written.
        """
        check_files(files)
        found = {}
        for entry, writers in self._writers.items():
            if len(writers) > 1:
                mine = [one for one in tensors if one.name in self._homes]
                mine = [one for one in mine if one.name.partition("/")[0] == entry]
                places = [self.place(one.name) for one in mine]
                index = {
                    "metadata": {"total_size": sum(one.nbytes for one in mine)},
                    "weight_map": {key: file for file, key in sorted(places)},
                }
                found[f"{whole_file(entry)}.index.json"] = index
        found |= files
        return {name: json.dumps(value, indent=1).encode() for name, value in found.items()}

    def keys(self, plan: SavePlan, rank: int) -> Iterator[tuple[str, str]]:
        """(file, key) of each piece that a rank writes; a number tells those of a tensor apart."""
        counts = Counter(tensor.name for tensor, _ in plan.pieces)
        seen: Counter[str] = Counter()
        for tensor, _ in plan.pieces:
            entry, _, key = tensor.name.partition("/")
            if counts[tensor.name] > 1:
                key = f"{key}#{seen[tensor.name]}"
            seen[tensor.name] += 1
            yield rank_file(entry, rank), key
