"""A folder of safetensors files in the making: what each file holds, and values as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.export.lazies import Box, Lazy
from megablocks_core.export.ours import NamedBox, Ours
from megablocks_core.export.slabs import slabs
from megablocks_core.files import NewFolder, create_file
from megablocks_core.files.safetensors import SafetensorsWriter
from megablocks_core.groups import Whole


class Written(NamedTuple):
    """A tensor of a file.

    Attributes:
        whole: Its name in the file, shape and dtype.
        value: What it is made of ours; of another dtype its values are converted.
        reads: How many bytes of ours a byte of it is made of.
    """

    whole: Whole
    value: Lazy
    reads: int = 1


class Slab(NamedTuple):
    """What is written at a time: a box of a tensor of the files, and its size there."""

    written: Written
    box: Box
    nbytes: int


class FolderDraft:
    """The folder in the making, on one of the ranks that write; files go to these in turn.

    Args:
        target: Where it will appear: new, or empty.
        files: By name the tensors of each, in order.
        ours: What they are made of.
        rank: This one of those that write; the first makes the folder and lets it appear.
        num_ranks: How many write.

    Attributes:
        staging: Where the files are until then; known once the folder is made.
    """

    def __init__(
        self,
        target: Path,
        files: Mapping[str, Sequence[Written]],
        ours: Ours,
        *,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._target = target
        self._files, self._ours = files, ours
        self._waiting = list(files)[rank::num_ranks]
        self._num_ranks = num_ranks
        self.staging: Path | None = None
        self._folder: NewFolder | None = None
        self._writer: SafetensorsWriter | None = None

    def wanted(self) -> dict[int, Iterator[tuple[Slab, list[NamedBox]]]]:
        """By rank the slabs of its files, in order, each with the boxes of ours that it needs."""
        return {rank: self._slabs(rank) for rank in range(self._num_ranks)}

    def _slabs(self, rank: int) -> Iterator[tuple[Slab, list[NamedBox]]]:
        for file in list(self._files)[rank :: self._num_ranks]:
            for written in self._files[file]:
                _, shape, dtype = written.whole
                for box in slabs(shape, dtype, written.reads):
                    size = prod(part.stop - part.start for part in box) * dtype.itemsize
                    yield Slab(written, box, size), self._ours.needs(written.value, box)

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
            wholes = [written.whole for written in self._files[file]]
            self._writer = SafetensorsWriter(self.staging / file, wholes, metadata={"format": "pt"})
        (whole, value, _), box, _ = slab
        made = self._ours.values(value, box, values)
        self._writer.write(whole.name, _converted(whole.name, made, whole.dtype))
        if self._writer.is_complete:
            self._writer.finish()
            self._writer = None

    def publish(self, beside: Mapping[str, bytes]) -> None:
        """Add the files ``beside`` the tensors, by name; let the folder appear.

        Raises:
            OSError: The files of other ranks are not in this rank's folder.
        """
        assert self._folder is not None and not self._waiting
        staging = self._folder.staging
        if missing := [file for file in self._files if not (staging / file).is_file()]:
            raise OSError(f"ranks that write {self._target} must see one folder: no {missing}")
        for name, data in beside.items():
            create_file(staging / name, data)
        self._folder.publish()

    def close(self) -> None:
        """Close the file; what was not published is deleted."""
        if self._writer is not None:
            self._writer.close()
        if self._folder is not None:
            self._folder.discard()


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if converted.dtype != tensor.dtype and (converted.isfinite() != tensor.isfinite()).any():
        raise ValueError(f"dtype={dtype} must hold the values of {name}: some became infinite")
    return converted
