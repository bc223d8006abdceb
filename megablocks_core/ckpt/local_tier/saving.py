"""Every rank writes its part into its own folder, and a copy of it into those of its partners."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from megablocks_core.ckpt.arguments import short
from megablocks_core.ckpt.format.writing import FileToWrite, Writer
from megablocks_core.ckpt.local_tier.parts import (
    Contents,
    PartId,
    SaveId,
    Slice,
    batches,
    complete_saves,
    file_of,
    remove_leftovers,
    remove_others,
    survey,
)
from megablocks_core.ckpt.manifest import MANIFEST, CheckpointError, Manifest, next_time
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.places.space import check_space
from megablocks_core.ckpt.state.entries import take_apart
from megablocks_core.ckpt.transfer.exchange import Exchange
from megablocks_core.groups import Group, together
from megablocks_core.groups.swaps import message_device, swap


def save_parts(
    folder: LocalPlace,
    step: int,
    state: Mapping[str, Any],
    *,
    group: Group,
    partners: Sequence[Sequence[int]],
    keep_last: int,
    limit: int,
) -> None:
    """Write this rank's part of ``state``, and copies of those of the ranks whose partner it is.

    Args:
        folder: This rank's.
        step: The caller's number of the save.
        state: As for ``save``.
        group: All ranks.
        partners: For each rank the ranks that keep its copies.
        keep_last: How many saves stay, this one included.
        limit: Bytes of a message.
    """
    work = _Work(folder, f"LocalTier.save({short(step)})", group, partners, limit)
    try:
        kept = work.begin(step, state, keep_last)
        work.write()
        work.commit()
    finally:
        work.discard()
    try:
        remove_others(folder, kept)
    except OSError as error:
        warnings.warn(f"saved, but an older part cannot be deleted: {error}", stacklevel=3)


class _Part:
    """One part in the making; each is used by one rank, front to back."""

    def __init__(self, folder: LocalPlace, part: PartId, contents: Contents, limit: int) -> None:
        self._folder, self._id = folder, part
        self._state = contents.manifest_state()
        slices = contents.slices()
        self.file: FileToWrite = file_of(slices)
        self.batches: list[list[Slice]] = batches(slices, limit)
        self._draft = self._writer = None
        self._text = ""
        self._is_durable = False

    @property
    def nbytes(self) -> int:
        return self.file.layout().size

    def open(self) -> None:
        self._draft = self._folder.draft(self._id.name)
        self._writer = Writer(self._draft.staging, [self.file])

    def add(self, number: int, tensors: Sequence[Tensor]) -> None:
        assert self._writer is not None
        for one, tensor in zip(self.batch(number), tensors, strict=True):
            self._writer.add(self.file.file, one.item.key, tensor)

    def batch(self, number: int) -> list[Slice]:
        return self.batches[number] if number < len(self.batches) else []

    def finish(self) -> str:
        """The hash of the manifest, which says all that was written."""
        assert self._writer is not None
        receipt = self._writer.finish()
        saved = self._id.save.saved_unix_ns
        manifest = Manifest(saved, self._state, receipt.tensors, receipt.files)
        self._text = manifest.text()
        return manifest.digest

    def publish(self) -> None:
        assert self._draft is not None
        if self._folder.child(self._id.name).is_there():
            raise ValueError(
                f"folder={str(self._folder)!r} must be another one on every host: it has "
                f"{self._id.name} already"
            )
        self._draft.commit(MANIFEST, self._text.encode())

    def keep(self) -> None:
        self._is_durable = True

    def discard(self) -> None:
        """Leave nothing, unless it is to be kept; never raises."""
        if self._writer is not None:
            self._writer.close()
        if self._draft is not None and not self._is_durable:
            with suppress(OSError):  # a part of a save that is not complete is never read
                self._draft.withdraw()
            self._draft.discard()


class _Work:
    """One rank's part of a save."""

    def __init__(
        self,
        folder: LocalPlace,
        task: str,
        group: Group,
        partners: Sequence[Sequence[int]],
        limit: int,
    ) -> None:
        self._folder, self._task, self._group, self._limit = folder, task, group, limit
        self._all_partners, self._partners = partners, partners[group.rank]
        self._sources = [rank for rank in range(group.size) if group.rank in partners[rank]]
        # This rank's part first, then the copies.
        self._parts: dict[int, _Part] = {}
        self._shares: dict[str, Any] = {}
        self._num_rounds = 0
        self._arriving: dict[int, list[Tensor]] = {}

    def begin(self, step: int, state: Mapping[str, Any], keep_last: int) -> list[SaveId]:
        """Take the state apart, tell the partners what is to come, and open all files.

        Returns:
            The saves that stay once this one is durable.
        """
        with self._together():
            if type(step) is not int or not 0 <= step < 2**63:
                raise ValueError(
                    f"step={short(step)} must be a whole number from 0 on, below 2**63"
                )
            remove_leftovers(self._folder)
            found = survey(self._folder)
            entries = take_apart(state, group=self._group)
            self._shares = {share.name: share for share in entries.shares}
            mine = Contents(entries.state, [share.outline for share in entries.shares])
            text = json.dumps(mine.manifest_state()).encode()
            num_rounds = len(batches(mine.slices(), self._limit))
        message = (step, len(text), num_rounds, list(found.parts), time.time_ns())
        steps, lengths, counts, held, times = zip(
            *self._group.all_gather_object(message), strict=True
        )
        if len(set(steps)) > 1:
            raise ValueError(f"step must be the same on all ranks, not {sorted(set(steps))}")
        self._num_rounds = max(counts)
        whole = complete_saves(held)
        newest = max((part.save.saved_unix_ns for parts in held for part in parts), default=0)
        save = SaveId(next_time(times[0], newest), step, self._group.size)
        texts = self._texts(text, lengths)
        with self._together():
            for rank, one in texts.items():
                part = PartId(save, rank)
                contents = Contents.of(json.loads(one), part.name)
                self._parts[rank] = _Part(self._folder, part, contents, self._limit)
            check_space(self._folder, sum(part.nbytes for part in self._parts.values()))
            for part in self._parts.values():
                part.open()
        return [save, *whole[: keep_last - 1]]

    def write(self) -> None:
        """Write and send what this rank holds, and write what arrives, batch by batch."""
        exchange = None
        for number in range(self._num_rounds):
            with self._together():
                if exchange is not None:
                    self._complete(number - 1, exchange)
                exchange = self._exchange(number)
            exchange.send()
        with self._together():
            if exchange is not None:
                self._complete(self._num_rounds - 1, exchange)

    def commit(self) -> None:
        """Give all folders their names once every copy has shown to be equal to its original."""
        with self._together():
            digests = {rank: part.finish() for rank, part in self._parts.items()}
        found = self._group.all_gather_object(digests)
        for rank, partners in enumerate(self._all_partners):
            for partner in partners:
                if found[partner][rank] != found[rank][rank]:
                    raise CheckpointError(
                        f"{self._task}: what rank {self._group.ranks[partner]} wrote as a copy "
                        f"is not what rank {self._group.ranks[rank]} wrote"
                    )
        with self._together():
            for part in self._parts.values():
                part.publish()
        for part in self._parts.values():
            part.keep()

    def discard(self) -> None:
        for part in self._parts.values():
            part.discard()

    def _texts(self, mine: bytes, lengths: Sequence[int]) -> dict[int, bytes]:
        """What this rank and those whose partner it is will write."""
        device = message_device(self._group)
        message = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        arriving = {
            rank: torch.empty(lengths[rank], dtype=torch.uint8, device=device)
            for rank in self._sources
        }
        swap(dict.fromkeys(self._partners, message), arriving, group=self._group)
        texts = {rank: bytes(one.cpu().numpy().data) for rank, one in arriving.items()}
        return {self._group.rank: mine, **texts}

    def _exchange(self, number: int) -> Exchange:
        mine = self._views(number)
        for rank in self._sources:
            if batch := self._parts[rank].batch(number):
                self._arriving[rank] = [
                    torch.empty(item.shape, dtype=item.dtype) for _, _, item in batch
                ]
        outgoing = dict.fromkeys(self._partners, mine) if mine else {}
        return Exchange(outgoing, self._arriving, group=self._group)

    def _complete(self, number: int, exchange: Exchange) -> None:
        exchange.unpack()
        self._parts[self._group.rank].add(number, self._views(number))
        while self._arriving:
            rank, tensors = self._arriving.popitem()
            self._parts[rank].add(number, tensors)

    def _views(self, number: int) -> list[Tensor]:
        batch = self._parts[self._group.rank].batch(number)
        return [self._shares[one.tensor].view(one.box) for one in batch]

    def _together(self) -> AbstractContextManager[None]:
        return together(self._task, group=self._group, raises=CheckpointError)
