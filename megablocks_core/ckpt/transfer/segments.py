"""Runs of elements read from files, into the tensors that want them or into passing memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.ckpt.format.stored import Stored, Target
from megablocks_core.ckpt.manifest import BLOCK_BYTES, DTYPES
from megablocks_core.ckpt.plans.boxes import lengths
from megablocks_core.ckpt.plans.load_plan import LoadRound, Part, Segment
from megablocks_core.ckpt.state.shares import Share
from megablocks_core.ckpt.transfer.windows import Windows
from megablocks_core.groups import as_bytes
from megablocks_core.groups.cuts import Box

# So many blocks at once pass through memory that is used again for the next ones.
_SCRATCH_BLOCKS = 4


class Runs(NamedTuple):
    """What was read in one round: the elements of each segment, as saved.

    Those that only this rank wants hold no longer than until they are where they belong.
    """

    work: LoadRound
    runs: list[Tensor]

    def value(self, number: int) -> Tensor:
        """The elements of one cut that is sent."""
        segment, part = self.work.cuts[number]
        return _value(part, self.work.segments[segment], self.runs[segment])


class Memory:
    """The memory that a load fills on this rank.

    Args:
        stored: The checkpoint.
        shares: What is to be filled.
        windows: This rank's window and those that it sees.
    """

    def __init__(self, stored: Stored, shares: Sequence[Share], windows: Windows) -> None:
        self._stored, self._windows = stored, windows
        self._shares = {share.name: share for share in shares}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        # What arrives in its saved dtype, to be cast: (memory of its own, where it belongs).
        self._to_cast: list[tuple[Tensor, Tensor]] = []

    def prepare(self, plan: Sequence[LoadRound]) -> None:
        """Make this rank's window as large as its plan asks."""
        ends = [
            place + self._nbytes(segment)
            for work in plan
            for place, segment in zip(work.places, work.segments, strict=True)
            if place >= 0
        ]
        self._windows.resize(max(ends, default=0))

    def read(self, work: LoadRound) -> Runs:
        """Read the segments of a round and fill this rank's tensors from them.

        A segment that no other rank wants goes straight to the tensor that wants it, if it lies
        there in one run.

        Raises:
            CheckpointError: A block is not what was written.
        """
        own: list[list[Part]] = [[] for _ in work.segments]
        for number in work.own:
            segment, part = work.cuts[number]
            own[segment].append(part)
        homes = [
            self._straight(segment, parts) if place < 0 else None
            for segment, place, parts in zip(work.segments, work.places, own, strict=True)
        ]
        runs = list(homes)
        for batch in self._batches(work, runs):
            self._fill(work, runs, batch)
            for number in batch:
                if homes[number] is None:
                    self._put(work.segments[number], own[number], _there(runs[number]))
        return Runs(work, [_there(run) for run in runs])

    def take(self, work: LoadRound) -> None:
        """Fill this rank's tensors from what others have read into their windows."""
        for rank, place, segment, parts in work.seen:
            self._put(segment, parts, self._run(self._windows.of(rank), place, segment))

    def arriving(self, name: str, box: Box) -> Tensor:
        """Memory for what another rank sends, in the saved dtype; ``settle`` once it is there."""
        view, dtype = self._shares[name].view(box), self._dtype(name)
        if view.dtype == dtype:
            return view
        self._to_cast.append((torch.empty(view.shape, dtype=dtype), view))
        return self._to_cast[-1][0]

    def settle(self) -> None:
        """Cast what has arrived and must be cast."""
        for arrived, view in self._to_cast:
            view.copy_(arrived)
        self._to_cast = []

    def _batches(self, work: LoadRound, runs: list[Tensor | None]) -> Iterator[list[int]]:
        """Give every segment memory, as many blocks at a time as scratch memory serves."""
        sent = {work.cuts[number].segment for cuts in work.outgoing.values() for number in cuts}
        batch, used = [], 0
        for _, numbers in groupby(range(len(runs)), lambda n: self._block(work.segments[n])):
            block = list(numbers)
            scratch = [n for n in block if runs[n] is None and work.places[n] < 0 and n not in sent]
            if scratch and used == _SCRATCH_BLOCKS:
                yield batch
                batch, used = [], 0
            for number in block:
                segment = work.segments[number]
                if number in scratch:
                    place = used * BLOCK_BYTES + self._offset(segment) % BLOCK_BYTES
                    runs[number] = self._run(self._own_scratch(), place, segment)
                elif work.places[number] >= 0:
                    runs[number] = self._run(self._windows.own(), work.places[number], segment)
                elif runs[number] is None:
                    length = segment.stop - segment.start
                    runs[number] = torch.empty(length, dtype=self._dtype(segment.name))
            used += bool(scratch)
            batch += block
        if batch:
            yield batch

    def _own_scratch(self) -> Tensor:
        if not len(self._scratch):
            self._scratch = torch.empty(_SCRATCH_BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
        return self._scratch

    def _fill(self, work: LoadRound, runs: Sequence[Tensor | None], batch: Sequence[int]) -> None:
        files: dict[str, list[Target]] = {}
        for number in batch:
            segment = work.segments[number]
            memory = as_bytes(_there(runs[number])).numpy().data
            target = Target(self._offset(segment), memory)
            files.setdefault(segment.chunk.file, []).append(target)
        for file, targets in files.items():
            self._stored.fill(file, sorted(targets, key=lambda target: target.offset))

    def _put(self, segment: Segment, parts: Sequence[Part], run: Tensor) -> None:
        """Copy what this rank wants of a segment to where it belongs."""
        for part in parts:
            self._shares[segment.name].view(part.box).copy_(_value(part, segment, run))

    def _run(self, memory: Tensor, place: int, segment: Segment) -> Tensor:
        """The elements of a segment that lie in ``memory`` from byte ``place`` on."""
        return memory[place : place + self._nbytes(segment)].view(self._dtype(segment.name))

    def _block(self, segment: Segment) -> tuple[str, int]:
        return segment.chunk.file, self._offset(segment) // BLOCK_BYTES

    def _offset(self, segment: Segment) -> int:
        return segment.chunk.offset + segment.start * self._dtype(segment.name).itemsize

    def _nbytes(self, segment: Segment) -> int:
        return (segment.stop - segment.start) * self._dtype(segment.name).itemsize

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._stored.manifest.tensors[name].dtype]

    def _straight(self, segment: Segment, parts: Sequence[Part]) -> Tensor | None:
        """The wanted memory as one run, if it is one and wants all of the segment."""
        share = self._shares.get(segment.name)
        if share is None or share.dtype != self._dtype(segment.name):
            return None
        views = [share.view(part.box) for part in parts]
        if sum(view.numel() for view in views) != segment.stop - segment.start:
            return None
        storage, end = views[0].untyped_storage().data_ptr(), views[0].data_ptr()
        for view in views:
            place = (view.untyped_storage().data_ptr(), view.data_ptr())
            if view.device.type != "cpu" or not view.is_contiguous() or place != (storage, end):
                return None
            end += view.nbytes
        return views[0].as_strided((segment.stop - segment.start,), (1,))


def _there(run: Tensor | None) -> Tensor:
    assert run is not None
    return run


def _value(part: Part, segment: Segment, run: Tensor) -> Tensor:
    """The values of a part, in the run of elements that holds its segment."""
    shape, starts = segment.chunk.shape, segment.chunk.start
    steps, step, first = [], 1, -segment.start
    for dim in range(len(shape) - 1, -1, -1):
        steps.insert(0, step)
        first += (part.box[dim].start - starts[dim]) * step
        step *= shape[dim]
    return run.as_strided(lengths(part.box), steps, run.storage_offset() + first)
