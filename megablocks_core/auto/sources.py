"""A Hugging Face folder, or a training checkpoint, as exporters see it: in one process, lazily."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megablocks_core.auto.checkpoints import CONFIG, described_checkpoint
from megablocks_core.ckpt.manifest import MANIFEST
from megablocks_core.ckpt.tools.dcp_reading import METADATA
from megablocks_core.export.arguments import folder_of
from megablocks_core.export.described import Described
from megablocks_core.export.drafting import Slab
from megablocks_core.export.dtypes import check_values, chosen
from megablocks_core.export.dtypes import dtype_of as dtype_in_files
from megablocks_core.export.layout import Layout, Rule
from megablocks_core.export.lazies import Lazy, shape_of
from megablocks_core.export.ours import NamedBox, Ours, Visited
from megablocks_core.export.quantised import plain
from megablocks_core.export.slabs import dtype_of, slabs
from megablocks_core.export.source import HfFolder
from megablocks_core.export.verifying import layout_of, verify
from megablocks_core.groups import LOCAL, Held, Whole

T = TypeVar("T")


def is_hf_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder in Hugging Face's format, and no training checkpoint."""
    folder = folder_of(path)
    is_checkpoint = any((folder / name).exists() for name in (MANIFEST, METADATA))
    return (folder / CONFIG).is_file() and not is_checkpoint


def described_source(
    source: str | os.PathLike[str],
    *,
    entry: str = "model",
    config: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    nbytes: Callable[[Described], int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Described:
    """What exporters see of the weights in a Hugging Face folder, or in a training checkpoint.

    All values are looked at once. Tensors of a folder that is quantised are the plain ones that
    they stand for.

    Args:
        source: The folder or checkpoint.
        entry: Of a checkpoint, the name of the weights in it.
        config: Of a checkpoint, the path of the model's ``config.json``.
        like: Of a checkpoint, a folder that has it.
        dtype: Of all floating-point tensors.
        nbytes: How large the files are that will be written of it.
        progress: Called with the bytes looked at so far, and all that are looked at and would be
            written in a plain folder. With ``nbytes`` also while what this gives is written, with
            what is then known to be looked at and written.

    Raises:
        ValueError: The source is not whole, or lacks what a config describes, values are not
            finite, or do not fit ``dtype``; or a folder is given what only a checkpoint has.
        CheckpointError: A checkpoint is damaged.
    """
    looked_at = 0

    def looked(done: int, total: int) -> None:
        nonlocal looked_at
        looked_at = done
        if progress is not None:
            progress(done, total)

    if is_hf_folder(source):
        for name, given in (("entry", entry != "model"), ("config", config is not None)):
            if given:
                raise ValueError(f"{name} must not be given for {source}, which is no checkpoint")
        found = _described_folder(folder_of(source), dtype, looked)
    else:
        words = {"entry": entry, "config": config, "like": like, "dtype": dtype}
        found = described_checkpoint(source, **words, progress=looked)[0]
    if progress is None or nbytes is None:
        return found
    noted = _Noted(found.collection, progress, looked_at, looked_at + nbytes(found))
    return replace(found, collection=noted)


def _described_folder(
    folder: Path, dtype: torch.dtype | None, progress: Callable[[int, int], None]
) -> Described:
    source = HfFolder(folder)
    said = plain(source.config)
    described = layout_of(said)
    verify(folder)
    names = [name for name in described.schema if name in source.tensors]
    tensors: dict[str, Lazy] = {name: source.tensors[name] for name in names}
    for name, twin in described.ties.items():
        if name in source.tensors and not _are_equal(source.tensors[name], tensors[twin]):
            raise ValueError(f"{folder}: {name} and {twin} are tied, but differ on disk")
    wholes = sorted(
        (Whole(name, source.shape(name), dtype_of(tensor)) for name, tensor in tensors.items()),
        key=lambda whole: -whole.dtype.itemsize,
    )
    dtypes = chosen(dtype, None)
    written = [one._replace(dtype=dtype_in_files(one.name, one.dtype, dtypes)) for one in wholes]
    rules = tuple(Rule({whole.name: whole.shape}, (whole.name,)) for whole in wholes)
    layout = Layout(rules, described.ties)
    total = sum(whole.nbytes for whole in (*wholes, *written))
    looked_at = _slabs(tensors, lambda done: progress(done, total))
    check_values(looked_at, layout, dtypes, group=LOCAL)
    ours = Ours(wholes)
    made = {whole.name: ours[whole.name] for whole in wholes}
    return Described(said, layout, _Reading(tensors), ours, written, made)


class _Reading:
    """The values of a folder's tensors, read box by box."""

    def __init__(self, tensors: Mapping[str, Lazy]) -> None:
        self._tensors = tensors

    def visit(
        self,
        wanted: Mapping[int, Iterable[tuple[T, Sequence[NamedBox]]]],
        consume: Callable[[T, list[Tensor]], None],
    ) -> None:
        """Call ``consume(key, values)`` for all that the one process wants, in order."""
        for key, boxes in wanted[0]:
            consume(key, [self._tensors[name][box] for name, box in boxes])


class _Noted:
    """What gives boxes, and tells of the bytes of files that have been written of them."""

    def __init__(
        self, inner: Visited, progress: Callable[[int, int], None], done: int, total: int
    ) -> None:
        self._inner, self._progress = inner, progress
        self._done, self._total = done, total

    def visit(
        self,
        wanted: Mapping[int, Iterable[tuple[T, Sequence[NamedBox]]]],
        consume: Callable[[T, list[Tensor]], None],
    ) -> None:
        """Call ``consume(key, values)`` for all that the one process wants, in order."""

        def seen(key: T, values: list[Tensor]) -> None:
            consume(key, values)
            if isinstance(key, Slab):
                self._done += key.nbytes
                self._progress(self._done, self._total)

        self._inner.visit(wanted, seen)


def _slabs(tensors: Mapping[str, Lazy], progress: Callable[[int], object]) -> Iterator[Held]:
    done = 0
    for name, tensor in tensors.items():
        for box in slabs(shape_of(tensor), dtype_of(tensor)):
            values = tensor[box]
            yield Held(name, values)
            done += values.nbytes
            progress(done)


def _are_equal(one: Lazy, other: Lazy) -> bool:
    boxes = slabs(shape_of(one), dtype_of(one))
    return all(torch.equal(one[box], other[box]) for box in boxes)
