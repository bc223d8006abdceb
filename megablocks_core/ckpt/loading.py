"""Fill ``state`` from a checkpoint, whatever layout it was saved under."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.ckpt.exchange import Exchange
from megablocks_core.ckpt.load_plan import LoadRound, plan_load
from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.outlines import holdings, pack
from megablocks_core.ckpt.places import place_of
from megablocks_core.ckpt.segments import Memory
from megablocks_core.ckpt.stored import Stored
from megablocks_core.ckpt.wanted import Wanted, check_cast, unexpected
from megablocks_core.groups import LOCAL, Group, together


class LoadReport(NamedTuple):
    """What did not fit: names that ``state`` has and the checkpoint lacks, and the reverse."""

    missing: list[str]
    unexpected: list[str]


def load(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    group: Group = LOCAL,
    strict: bool = True,
    cast: Mapping[torch.dtype, torch.dtype] | None = None,
) -> LoadReport:
    """Fill ``state`` from the checkpoint ``path``, at any layout.

    Modules, optimizers and tensors are filled in place, JSON values are set in ``state``. Each
    block of a file in which something is needed is read and checked against its hash once, by one
    rank, which sends the others what they need of it, a bounded bucket at a time.

    Args:
        path: The checkpoint's folder, or a URL that fsspec knows.
        state: As for ``save``; JSON values there are only names for what will be set.
        group: All ranks that load.
        strict: Names that are missing on either side raise. Shapes and dtypes must agree
            in any case.
        cast: Floating-point dtypes as saved, each with the one that a tensor of ``state`` may
            have in its place; ``{torch.float32: torch.bfloat16}`` rounds. Others must agree.

    Returns:
        The names that are missing on either side, on any rank (none if ``strict``).

    Raises:
        ValueError: ``state`` does not fit the checkpoint; nothing was changed.
        CheckpointError: The checkpoint is not whole or is damaged, or another rank failed.
            When damage shows only while tensors are read, ``state`` is partly filled.
    """
    task = f"load({str(path)!r})"
    with together(task, group=group, raises=CheckpointError):
        check_cast(cast or {})
        place = place_of(path)
        stored = Stored(place, sizes=group.rank == 0, readers=group.size)
        if group.rank == 0:
            stored.check_rest()
    with together(task, group=group, raises=CheckpointError):
        wanted = Wanted(state, stored.manifest, group=group, cast=cast or {})
        outlines = pack([share.outline for share in wanted.shares])
    message = (stored.manifest.digest, wanted.missing, wanted.asked, wanted.faults, outlines)
    # From here to the plan every rank has the same input, and an error of one is one of all.
    digests, missing, asked, faults, packed = zip(*group.all_gather_object(message), strict=True)
    if len(set(digests)) > 1:
        raise CheckpointError(f"{task}: ranks see different checkpoints under this path")
    faults = list(dict.fromkeys(chain(*faults)))
    if faults:
        raise ValueError(f"state does not fit {place}: {_first(faults, between='; ')}")
    tensors = holdings(packed)
    report = LoadReport(
        list(dict.fromkeys(chain(*missing))),
        unexpected(stored.manifest, set().union(*asked), {tensor.name for tensor in tensors}),
    )
    _check(report, str(place), strict=strict)
    _Work(stored, wanted, task, group).fill(
        lambda: plan_load(tensors, stored.manifest.tensors, group.rank, num_ranks=group.size),
        lambda: wanted.finish(state),
    )
    return report


def _check(report: LoadReport, path: str, *, strict: bool) -> None:
    faults = []
    if strict and report.missing:
        faults.append(f"the checkpoint lacks {_first(report.missing)}")
    if strict and report.unexpected:
        faults.append(f"state lacks {_first(report.unexpected)}")
    if faults:
        raise ValueError(f"state does not fit {path}: {'; '.join(faults)}")


def _first(texts: list[str], *, between: str = ", ") -> str:
    """The first three; a model of another size would fill pages."""
    more = f"{between}and {len(texts) - 3} more" if len(texts) > 3 else ""
    return between.join(texts[:3]) + more


class _Work:
    """One rank's part of a load."""

    def __init__(self, stored: Stored, wanted: Wanted, task: str, group: Group) -> None:
        self._memory = Memory(stored, wanted.shares)
        self._task, self._group = task, group

    def fill(self, make_plan: Callable[[], list[LoadRound]], finish: Callable[[], None]) -> None:
        """Read, send and receive, round by round, and then ``finish``."""
        with self._together():
            plan = make_plan()
            exchange = self._next(plan, None, finish)
        while exchange is not None:
            exchange.send()
            with self._together():
                exchange = self._next(plan, exchange, finish)

    def _next(
        self, plan: list[LoadRound], exchange: Exchange | None, finish: Callable[[], None]
    ) -> Exchange | None:
        """Settle one round, and prepare the next one of ``plan`` or, after the last, finish."""
        if exchange is not None:
            exchange.unpack()
            self._memory.settle()
        if plan:
            return self._exchange(plan.pop(0))
        finish()
        return None

    def _exchange(self, work: LoadRound) -> Exchange:
        """Read what this rank reads; ranks that need the same cuts share one message."""
        read = self._memory.read(work)
        packages: dict[tuple[int, ...], list[Tensor]] = {}
        for cuts in map(tuple, work.outgoing.values()):
            if cuts not in packages:
                packages[cuts] = [read.value(number) for number in cuts]
        outgoing = {peer: packages[tuple(cuts)] for peer, cuts in work.outgoing.items()}
        incoming = {
            peer: [self._memory.arriving(name, box) for name, box in boxes]
            for peer, boxes in work.incoming.items()
        }
        return Exchange(outgoing, incoming, group=self._group)

    def _together(self) -> AbstractContextManager[None]:
        return together(self._task, group=self._group, raises=CheckpointError)
