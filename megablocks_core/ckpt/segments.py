"""Runs of elements read from files, into the tensors that want them or into passing memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.ckpt.boxes import inside, lengths
from megablocks_core.ckpt.load_plan import Cut, LoadRound, Segment
from megablocks_core.ckpt.manifest import DTYPES
from megablocks_core.ckpt.shares import Share
from megablocks_core.ckpt.stored import Stored, Target
from megablocks_core.groups import as_bytes
from megablocks_core.groups.cuts import Box


class Runs(NamedTuple):
    """What was read in one round: the elements of each segment, as saved."""

    work: LoadRound
    runs: list[Tensor]

    def value(self, number: int) -> Tensor:
        """The elements of one cut."""
        cut = self.work.cuts[number]
        return _value(cut, self.work.segments[cut.segment], self.runs[cut.segment])


class Memory:
    """The memory that a load fills on this rank.

    Args:
        stored: The checkpoint.
        shares: What is to be filled.
    """

    def __init__(self, stored: Stored, shares: Sequence[Share]) -> None:
        self._stored = stored
        self._shares = {share.name: share for share in shares}
        # What arrives in its saved dtype, to be cast: (memory of its own, where it belongs).
        self._to_cast: list[tuple[Tensor, Tensor]] = []

    def read(self, work: LoadRound) -> Runs:
        """Read the segments of a round and fill this rank's tensors from them.

        A segment goes straight to the tensor that wants it if it lies there in one run.

        Raises:
            CheckpointError: A block is not what was written.
        """
        own: list[list[Cut]] = [[] for _ in work.segments]
        for number in work.own:
            own[work.cuts[number].segment].append(work.cuts[number])
        runs, straight = [], []
        files: dict[str, list[Target]] = {}
        for segment, cuts in zip(work.segments, own, strict=True):
            run = self._straight(segment, cuts)
            straight.append(run is not None)
            runs.append(self._passing(segment) if run is None else run)
            target = Target(self._offset(segment), as_bytes(runs[-1]).numpy().data)
            files.setdefault(segment.chunk.file, []).append(target)
        for file, targets in files.items():
            self._stored.fill(file, sorted(targets, key=lambda target: target.offset))
        read = Runs(work, runs)
        for number in work.own:
            cut = work.cuts[number]
            if not straight[cut.segment]:
                share = self._shares[work.segments[cut.segment].name]
                share.view(cut.box).copy_(read.value(number))
        return read

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

    def _offset(self, segment: Segment) -> int:
        return segment.chunk.offset + segment.start * self._dtype(segment.name).itemsize

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._stored.manifest.tensors[name].dtype]

    def _passing(self, segment: Segment) -> Tensor:
        return torch.empty(segment.stop - segment.start, dtype=self._dtype(segment.name))

    def _straight(self, segment: Segment, cuts: Sequence[Cut]) -> Tensor | None:
        """The wanted memory as one run, if it is one and wants all of the segment."""
        share = self._shares.get(segment.name)
        if share is None or share.dtype != self._dtype(segment.name):
            return None
        views = [share.view(cut.box) for cut in cuts]
        if sum(view.numel() for view in views) != segment.stop - segment.start:
            return None
        storage, end = views[0].untyped_storage().data_ptr(), views[0].data_ptr()
        for view in views:
            place = (view.untyped_storage().data_ptr(), view.data_ptr())
            if view.device.type != "cpu" or not view.is_contiguous() or place != (storage, end):
                return None
            end += view.nbytes
        return views[0].as_strided((segment.stop - segment.start,), (1,))


def _value(cut: Cut, segment: Segment, run: Tensor) -> Tensor:
    """The values of a cut, in the run of elements that holds it."""
    strides, box = [1], segment.chunk.box
    for length in reversed(segment.chunk.shape[1:]):
        strides.insert(0, strides[0] * length)
    first = sum(part.start * step for part, step in zip(cut.run, strides, strict=False))
    shape = lengths(cut.run)
    part = run[first - segment.start :][: prod(shape)].view(shape)
    return part[inside(inside(cut.box, box), cut.run)]
