"""A training checkpoint as a Hugging Face folder, a tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megablocks_core.ckpt.tools.checkpoint import Checkpoint, read_whole
from megablocks_core.ckpt.tools.checkpoint import Held as Kept
from megablocks_core.ckpt.tools.opening import open_checkpoint
from megablocks_core.export.arguments import check_bytes, folder_of
from megablocks_core.export.described import Described
from megablocks_core.export.drafting import FolderDraft, Slab, Written
from megablocks_core.export.dtypes import check_values, chosen
from megablocks_core.export.hf_files import beside, made_of, name_dtype, planned, split
from megablocks_core.export.layout import Layout
from megablocks_core.export.ours import NamedBox, Ours
from megablocks_core.export.quantised import plain
from megablocks_core.export.verifying import layout_of
from megablocks_core.files import check_new, read_json
from megablocks_core.groups import LOCAL, Held, Whole

T = TypeVar("T")
CONFIG = "config.json"
# What averages of weights call their one tensor of each.
_AVERAGE = "/average"


class _Part(NamedTuple):
    """One logical tensor: its full name in the checkpoint, and what it becomes."""

    full_name: str
    held: Kept


def checkpoint_to_hf(
    checkpoint: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    entry: str = "model",
    config: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 2**30,
    allow_nonfinite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the weights in a training checkpoint as a folder that transformers opens.

    The files have the bytes that ``save_hf`` writes of the same model. One tensor is in memory at
    a time, or those that a few MiB of one are made of. The folder appears whole or not at all.

    Args:
        checkpoint: Of this library, at any layout; of torch's DCP; or of Megatron's ``torch_dist``.
        path: The folder: new, or empty.
        entry: Name of the weights in the checkpoint: of a module, or of a ``MovingAverage``. An
            average is written in the dtypes of the weights, and with those that have none.
        config: Path of the model's ``config.json``. Default that of ``like``, else the one that
            was saved beside the weights (``ckpt.save(files={"config.json": ...})``).
        like: A folder whose tokenizer files are copied.
        dtype: Of all floating-point tensors; default each weight's own.
        max_file_bytes: A file is closed before it grows beyond this.
        allow_nonfinite: Whether NaN and infinite values are written like others.
        progress: Called with the bytes looked at and written so far, and in all.

    Raises:
        ValueError: ``path`` is not empty, there is no ``entry`` or no config, its family is
            unknown, the tensors are not those that it describes, or values are not finite or do
            not fit ``dtype``. Nothing was written.
        CheckpointError: ``checkpoint`` is damaged.
        OSError: The disk is full, or another fault of the file system.
    """
    target = Path(os.path.realpath(folder_of(path)))
    check_new(target)
    check_bytes(max_file_bytes, "max_file_bytes")
    found, done = described_checkpoint(
        checkpoint,
        entry=entry,
        config=config,
        like=like,
        dtype=dtype,
        allow_nonfinite=allow_nonfinite,
        progress=progress,
    )
    name_dtype(found.config, found.wholes)
    total = done + sum(whole.nbytes for whole in found.wholes)
    written = [Written(whole, found.made[whole.name]) for whole in found.wholes]
    files = split(written, max_file_bytes)
    draft = FolderDraft(target, files, found.ours)

    def add(slab: Slab, values: list[Tensor]) -> None:
        nonlocal done
        draft.add(slab, values)
        done += slab.nbytes
        if progress is not None:
            progress(done, total)

    try:
        draft.open()
        found.collection.visit(draft.wanted(), add)
        draft.publish(beside(files, found.config, None if like is None else Path(like)))
    finally:
        draft.close()


def described_checkpoint(
    checkpoint: str | os.PathLike[str],
    *,
    entry: str = "model",
    config: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    allow_nonfinite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Described, int]:
    """What exporters see of the weights in a checkpoint, and how many bytes were looked at.

    Args:
        checkpoint: As ``checkpoint_to_hf`` has it, and so have the others.
        entry: Name of the weights in it.
        config: Path of the model's ``config.json``.
        like: A folder that may have the config, and dtypes.
        dtype: Of all floating-point tensors.
        allow_nonfinite: Whether NaN and infinite values are written like others.
        progress: Called with the bytes looked at so far, and all that are looked at and written.

    Raises:
        ValueError: What ``checkpoint_to_hf`` says.
        CheckpointError: ``checkpoint`` is damaged.
    """
    dtypes = chosen(dtype, like)
    folder = None if like is None else folder_of(like, "like")
    given = folder / CONFIG if config is None and folder is not None else config
    opened = open_checkpoint(checkpoint, config=given)
    said = plain(_config_of(opened, given, str(checkpoint)))
    parts = _parts(opened, entry, str(checkpoint))
    layout = layout_of(said).named(parts)
    parts = _without_twins(opened, parts, layout)
    places = {name: place for place, name in enumerate(layout.order)}
    wholes = sorted(
        (Whole(name, part.held.shape, part.held.dtype) for name, part in parts.items()),
        key=lambda whole: (-whole.dtype.itemsize, places.get(whole.name, len(places))),
    )
    written = planned(wholes, layout, dtypes)
    done = sum(whole.nbytes for whole in wholes)
    total = done + sum(whole.nbytes for whole in written)
    looked_at = _slabs(opened, parts, lambda so_far: progress and progress(so_far, total))
    check_values(looked_at, layout, dtypes, group=LOCAL, allow_nonfinite=allow_nonfinite)
    ours = Ours(wholes)
    made = made_of(ours, layout)
    return Described(said, layout, _Reading(opened, parts), ours, written, made), done


class _Reading:
    """The values of an entry: what is wanted at a time is read whole, and kept while it is."""

    def __init__(self, opened: Checkpoint, parts: Mapping[str, _Part]) -> None:
        self._opened, self._parts = opened, parts

    def visit(
        self,
        wanted: Mapping[int, Iterable[tuple[T, Sequence[NamedBox]]]],
        consume: Callable[[T, list[Tensor]], None],
    ) -> None:
        """Call ``consume(key, values)`` for all that the one process wants, in order."""
        held: dict[str, Tensor] = {}
        for key, boxes in wanted[0]:
            names = dict.fromkeys(name for name, _ in boxes)
            held = {name: held[name] for name in names if name in held}
            for name in names:
                if name not in held:
                    held[name] = _values(self._opened, self._parts[name])
            consume(key, [held[name][box] for name, box in boxes])


def _config_of(
    opened: Checkpoint, given: str | os.PathLike[str] | None, checkpoint: str
) -> dict[str, Any]:
    if given is not None:
        return read_json(Path(given), dict)
    data = opened.beside().get(CONFIG)
    if data is None:
        raise ValueError(
            f"{checkpoint} has no {CONFIG} beside its tensors: config must be the model's "
            f"{CONFIG}, or like a folder that has one"
        )
    try:
        said = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{CONFIG} in {checkpoint} is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f"{CONFIG} in {checkpoint} must hold a dict at its top")
    return said


def _parts(opened: Checkpoint, entry: str, checkpoint: str) -> dict[str, _Part]:
    """The logical tensors of an entry."""
    kinds = {name: one["kind"] for name, one in opened.state.items()}
    own = {
        name.removeprefix(f"{entry}/"): held
        for name, held in opened.tensors.items()
        if name.startswith(f"{entry}/")
    }
    if kinds.get(entry) == "module":
        return {name: _Part(f"{entry}/{name}", held) for name, held in own.items()}
    if kinds.get(entry) == "optimizer" and own and all(name.endswith(_AVERAGE) for name in own):
        module = next(iter(own)).partition("/")[0]
        parts = _parts(opened, module, checkpoint)
        for name, part in parts.items():
            average = f"{module}/{name}{_AVERAGE}"
            if average in own:
                parts[name] = _Part(f"{entry}/{average}", part.held)
        return parts
    modules = [name for name, kind in kinds.items() if kind == "module"]
    raise ValueError(
        f"entry={entry!r} must be the weights of a model, or their average, in {checkpoint}, "
        f"where {modules} are modules"
    )


def _without_twins(opened: Checkpoint, parts: dict[str, _Part], layout: Layout) -> dict[str, _Part]:
    """Without tied tensors that were saved under both names, and tables that nobody reads."""
    kept = {name: part for name, part in parts.items() if not layout.ignores(name)}
    described = set(layout.order)
    for name, twin in layout.tied_parts.items():
        if name in kept and name not in described and twin in kept:
            first, second = kept.pop(name), kept[twin]
            if not _are_equal(opened, first, second):
                raise ValueError(f"{name} and {twin} are tied, but differ in the checkpoint")
    return kept


def _are_equal(opened: Checkpoint, one: _Part, other: _Part) -> bool:
    return one.held == other.held and all(
        torch.equal(opened.read(one.full_name, box), opened.read(other.full_name, box))
        for box in one.held.slabs()
    )


def _slabs(
    opened: Checkpoint, parts: dict[str, _Part], progress: Callable[[int], object]
) -> Iterator[Held]:
    """All values as they will be written, some at a time; ``progress`` hears of their bytes."""
    done = 0
    for name, part in parts.items():
        for box in part.held.slabs():
            values = opened.read(part.full_name, box).to(part.held.dtype)
            yield Held(name, values)
            done += values.nbytes
            progress(done)


def _values(opened: Checkpoint, part: _Part) -> Tensor:
    return read_whole(opened, part.full_name).to(part.held.dtype)
