"""Every rank fills its state from its part, its own or a copy, wherever one is found."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor

from megablocks_core.ckpt.arguments import check_state
from megablocks_core.ckpt.format.manifest_reading import parse_manifest
from megablocks_core.ckpt.format.stored import Stored, Target
from megablocks_core.ckpt.loading.newest import is_passed_over
from megablocks_core.ckpt.local_tier.parts import (
    FILE,
    Contents,
    PartId,
    SaveId,
    Slice,
    batches,
    complete_saves,
    survey,
)
from megablocks_core.ckpt.manifest import DTYPES, CheckpointError, Manifest
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.plans.outlines import Outline
from megablocks_core.ckpt.state.wanted import Wanted, unexpected
from megablocks_core.ckpt.transfer.exchange import Exchange
from megablocks_core.groups import Group, as_bytes, together
from megablocks_core.groups.swaps import message_device, swap

_TASK = "LocalTier.load_newest()"


def load_newest_parts(
    folder: LocalPlace, state: MutableMapping[str, Any], *, group: Group, limit: int
) -> int | None:
    """Fill ``state`` from the newest save of which every part can be read; returns its step.

    Raises:
        ValueError: ``state`` does not fit, or the group has another size.
        CheckpointError: There are parts, and no save can be read.
    """
    with together(_TASK, group=group, raises=CheckpointError):
        check_state(state, to_fill=True)
        found = survey(folder)
        for fault in found.faults:
            warnings.warn(fault, stacklevel=3)
    mine = [(part, len(text)) for part, text in found.parts.items()]
    held = [dict(parts) for parts in group.all_gather_object(mine)]
    whole = complete_saves(held)
    faults = _incomplete(held, whole)
    for save in whole:
        if save.num_ranks != group.size:
            raise ValueError(
                f"{_TASK}: step {save.step} was saved by {save.num_ranks} ranks and this group "
                f"has {group.size}; another layout is served by save and load alone"
            )
        try:
            _Work(folder, found.parts, save, held, group, limit).fill(state)
        except Exception as error:
            if not is_passed_over(error, group=group):
                raise
            faults.append(f"step {save.step}: {error}")
            continue
        if faults and group.rank == 0:
            warnings.warn(f"passed over {'; '.join(faults)}", stacklevel=3)
        return save.step
    if faults:
        raise CheckpointError(f"{_TASK}: no save can be read: {'; '.join(faults)}")
    return None


def _incomplete(held: Sequence[Mapping[PartId, int]], whole: Sequence[SaveId]) -> list[str]:
    """What is lost of the saves that are not complete."""
    found: dict[SaveId, set[int]] = {}
    for save, rank in chain.from_iterable(held):
        if save not in whole:
            found.setdefault(save, set()).add(rank)
    return [
        f"step {save.step}: no folder has the parts of ranks "
        f"{sorted(set(range(save.num_ranks)) - ranks)} of {save.num_ranks}"
        for save, ranks in sorted(found.items(), reverse=True)
    ]


class _Served:
    """A part that this rank reads, for itself or for another."""

    def __init__(self, folder: LocalPlace, part: PartId, limit: int) -> None:
        self._stored = Stored(folder.child(part.name), sizes=False)
        contents = Contents.of(self._stored.manifest.state, part.name)
        self._batches = batches(contents.slices(), limit)
        self.error = ""

    def read(self, number: int, views: Sequence[Tensor] | None) -> list[Tensor]:
        """A batch, in ``views`` if they are given, or in memory of its own.

        What follows an error, which is noted, holds anything.
        """
        batch = self._batches[number] if number < len(self._batches) else []
        rooms = [
            view if _is_plain(view) else torch.empty(one.item.shape, dtype=one.item.dtype)
            for one, view in zip(batch, views or [None] * len(batch), strict=True)
        ]
        try:
            if not self.error:
                self._fill(batch, rooms)
        except (CheckpointError, OSError) as error:
            self.error = str(error)
        for room, view in zip(rooms, views or rooms, strict=True):
            if room is not view and not self.error:
                view.copy_(room)
        return rooms

    def _fill(self, batch: Sequence[Slice], rooms: Sequence[Tensor]) -> None:
        targets = []
        for (_, _, item), room in zip(batch, rooms, strict=True):
            known = self._stored.manifest.tensors.get(item.name)
            if known is None or (known.shape, DTYPES[known.dtype]) != (item.shape, item.dtype):
                raise CheckpointError(f"{self._stored.path(FILE)} lacks {item.key}")
            targets.append(Target(known.chunks[0].offset, as_bytes(room).numpy().data))
        self._stored.fill(FILE, targets)


def _is_plain(view: Tensor | None) -> TypeGuard[Tensor]:
    """Whether bytes can be read straight into it."""
    return view is not None and view.device.type == "cpu" and view.is_contiguous()


class _Work:
    """One rank's part of loading one save."""

    def __init__(
        self,
        folder: LocalPlace,
        texts: Mapping[PartId, bytes],
        save: SaveId,
        held: Sequence[Mapping[PartId, int]],
        group: Group,
        limit: int,
    ) -> None:
        self._folder, self._texts, self._save = folder, texts, save
        self._held, self._group, self._limit = held, group, limit
        # For each part the ranks that hold it: its own rank, then copies.
        self._holders = [self._found(rank) for rank in range(group.size)]
        self._shares: dict[str, Any] = {}
        self._batches: list[list[Slice]] = []

    def fill(self, state: MutableMapping[str, Any]) -> None:
        """Load, or raise on all ranks.

        Raises:
            ValueError: ``state`` does not fit; nothing was changed.
            CheckpointError: A part cannot be read from any folder.
        """
        wanted, num_rounds = self._prepare(state)
        pending = set(range(self._group.size))
        while pending:
            pending = self._attempt(pending, num_rounds)
        with self._together():
            wanted.finish(state)

    def _found(self, rank: int) -> list[int]:
        part = PartId(self._save, rank)
        holders = [other for other, parts in enumerate(self._held) if part in parts]
        # Of those that share a folder each serves some.
        start = holders.index(rank) if rank in holders else rank % max(len(holders), 1)
        return holders[start:] + holders[:start]

    def _prepare(self, state: MutableMapping[str, Any]) -> tuple[Wanted, int]:
        """Hold ``state`` against this rank's part; also the number of rounds of an attempt."""
        text = self._manifest_text()
        with self._together():
            part = PartId(self._save, self._group.rank)
            contents = Contents.of(parse_manifest(text, part.name).state, part.name)
            whole = contents.wholes(self._save.saved_unix_ns)
            wanted = Wanted(state, whole, group=self._group, cast={})
            faults = _faults(wanted, whole, contents.outlines)
            self._shares = {share.name: share for share in wanted.shares}
            self._batches = batches(contents.slices(), self._limit)
        message = (faults, len(self._batches))
        found, counts = zip(*self._group.all_gather_object(message), strict=True)
        for rank, faults in enumerate(found):
            if faults:
                more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
                raise ValueError(
                    f"state does not fit step {self._save.step} on rank "
                    f"{self._group.ranks[rank]}: {'; '.join(faults[:3])}{more}"
                )
        return wanted, max(counts)

    def _manifest_text(self) -> bytes:
        """The manifest of this rank's part, from its own folder or from who has it."""
        rank, device = self._group.rank, message_device(self._group)
        outgoing, incoming = {}, {}
        for other, (holder, *_) in enumerate(self._holders):
            part = PartId(self._save, other)
            if holder == rank != other:
                text = torch.frombuffer(bytearray(self._texts[part]), dtype=torch.uint8)
                outgoing[other] = text.to(device)
            elif holder != rank == other:
                size = self._held[holder][part]
                incoming[holder] = torch.empty(size, dtype=torch.uint8, device=device)
        swap(outgoing, incoming, group=self._group)
        for arrived in incoming.values():
            return bytes(arrived.cpu().numpy().data)
        return self._texts[PartId(self._save, rank)]

    def _attempt(self, pending: set[int], num_rounds: int) -> set[int]:
        """Read the parts ``pending``, each from the first of its holders; those that failed.

        Of a part that failed the holder is struck off.

        Raises:
            CheckpointError: No holder is left.
        """
        served: dict[int, _Served] = {}
        exchange = None
        with self._together():
            for rank in sorted(pending):
                if self._holders[rank][0] == self._group.rank:
                    part = PartId(self._save, rank)
                    served[rank] = _Served(self._folder, part, self._limit)
        for number in range(num_rounds):
            with self._together():
                if exchange is not None:
                    exchange.unpack()
                exchange = self._exchange(number, pending, served)
            exchange.send()
        with self._together():
            if exchange is not None:
                exchange.unpack()
        mine = {rank: part.error for rank, part in served.items() if part.error}
        failed: dict[int, str] = {}
        for errors in self._group.all_gather_object(mine):
            failed |= errors
        for rank, text in failed.items():
            del self._holders[rank][0]
            if not self._holders[rank]:
                raise CheckpointError(f"the part of rank {rank} cannot be read: {text}")
            if self._group.rank == 0:
                warnings.warn(f"taking a copy of the part of rank {rank}: {text}", stacklevel=5)
        return set(failed)

    def _exchange(self, number: int, pending: set[int], served: Mapping[int, _Served]) -> Exchange:
        """Read a batch of each part that this rank serves: for itself, and to be sent."""
        rank = self._group.rank
        mine = self._batches[number] if number < len(self._batches) else []
        views = [self._shares[one.tensor].view(one.box) for one in mine]
        outgoing = {}
        for other, part in served.items():
            tensors = part.read(number, views if other == rank else None)
            if tensors and other != rank:
                outgoing[other] = tensors
        source = self._holders[rank][0]
        is_sent = rank in pending and source != rank and views
        return Exchange(outgoing, {source: views} if is_sent else {}, group=self._group)

    def _together(self) -> AbstractContextManager[None]:
        return together(_TASK, group=self._group, raises=CheckpointError)


def _faults(wanted: Wanted, whole: Manifest, outlines: Sequence[Outline]) -> list[str]:
    """Why ``state`` is not what this rank saved."""
    faults = list(wanted.faults)
    faults += [f"{name} was not saved" for name in wanted.missing]
    names = {share.name for share in wanted.shares}
    faults += [f"{name} is lacking" for name in unexpected(whole, wanted.asked, names)]
    saved = {one.name: sorted(map(_ends, one.boxes)) for one in outlines}
    for share in wanted.shares:
        if sorted(_ends(piece.box) for piece in share.pieces) != saved[share.name]:
            faults.append(f"{share.name} is cut otherwise than it was saved")
    return faults


def _ends(box: Sequence[slice]) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in box]
