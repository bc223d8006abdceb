"""Fill ``state`` from a checkpoint, whatever layout it was saved under."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megablocks_core.ckpt.arguments import check_state, short
from megablocks_core.ckpt.format.stored import Stored
from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.places.places import is_url, place_of
from megablocks_core.ckpt.plans.load_plan import SMALL_BYTES, LoadRound, plan_load
from megablocks_core.ckpt.plans.outlines import Packed, holdings, pack
from megablocks_core.ckpt.plans.rounds import BUCKET_BYTES
from megablocks_core.ckpt.state.wanted import Wanted, check_cast, unexpected
from megablocks_core.ckpt.transfer.exchange import Exchange
from megablocks_core.ckpt.transfer.segments import Memory
from megablocks_core.ckpt.transfer.windows import Address, Windows
from megablocks_core.groups import LOCAL, Group, check_group, together
from megablocks_core.groups.swaps import on_any

Mine = TypeVar("Mine")
Told = TypeVar("Told")


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
    rank, which shows or sends the others what they need of it, a bounded bucket at a time.

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
        ValueError: An argument is wrong, or ``state`` does not fit the checkpoint; nothing was
            changed.
        CheckpointError: The checkpoint is not whole or is damaged, or another rank failed.
            When damage shows only while tensors are read, ``state`` is partly filled.
    """
    check_group(group)
    task = f"load({str(path)!r})"
    with Windows() as windows:
        steps = _Steps(task, group)
        (stored, wanted), told = steps.gather(
            lambda: _look(
                path,
                state,
                windows,
                group=group,
                strict=strict,
                cast={} if cast is None else cast,
            )
        )
        # From here to the plan every rank has the same input, and an error of one is one of all.
        digests, stricts, missing, asked, faults, packed, addresses = zip(*told, strict=True)
        if len(set(stricts)) > 1:
            raise ValueError(f"strict must be the same on all ranks, not {list(stricts)}")
        if len(set(digests)) > 1:
            raise CheckpointError(f"{task}: ranks see different checkpoints under this path")
        faults = list(dict.fromkeys(chain(*faults)))
        if faults:
            raise ValueError(f"state does not fit {path}: {_first(faults, between='; ')}")
        tensors = holdings(packed)
        report = LoadReport(
            list(dict.fromkeys(chain(*missing))),
            unexpected(stored.manifest, set().union(*asked), {tensor.name for tensor in tensors}),
        )
        _check(report, str(path), strict=strict)
        hosts = windows.open(addresses, group=group)
        # Messages, and answers of a store, want to be few and large.
        limit = BUCKET_BYTES if len(set(hosts)) > 1 or is_url(path) else SMALL_BYTES
        kept, rank = stored.manifest.tensors, group.rank
        _Work(Memory(stored, wanted.shares, windows), steps, group).fill(
            lambda: plan_load(tensors, kept, rank, hosts=hosts, limit=limit),
            lambda: wanted.finish(state),
        )
    return report


class _Told(NamedTuple):
    """What one rank tells the others before the load is planned."""

    digest: str
    strict: bool
    missing: list[str]
    asked: set[str]
    faults: list[str]
    outlines: Packed
    address: Address | None


def _look(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    windows: Windows,
    *,
    group: Group,
    strict: bool,
    cast: Mapping[torch.dtype, torch.dtype],
) -> tuple[tuple[Stored, Wanted], _Told]:
    """Hold ``state`` against what is stored; nothing is sent yet."""
    check_state(state, to_fill=True)
    check_cast(cast)
    if not isinstance(strict, bool):
        raise ValueError(f"strict={short(strict)} must be True or False")
    stored = Stored(place_of(path), sizes=group.rank == 0, readers=group.size)
    if group.rank == 0:
        stored.check_rest()
    wanted = Wanted(state, stored.manifest, group=group, cast=cast)
    outlines = pack([share.outline for share in wanted.shares])
    address = windows.create() if group.size > 1 else None
    digest = stored.manifest.digest
    told = _Told(digest, strict, wanted.missing, wanted.asked, wanted.faults, outlines, address)
    return (stored, wanted), told


class _Steps:
    """Steps that all ranks take, and that fail on all of them or on none, as with ``together``.

    One that goes well costs no message but a word. The bodies must not communicate.
    """

    def __init__(self, task: str, group: Group) -> None:
        self._task, self._group = task, group

    def gather(self, look: Callable[[], tuple[Mine, Told]]) -> tuple[Mine, list[Told]]:
        """What ``look`` finds: what stays here, and what every rank tells the others."""
        mine: tuple[Mine, Told] | None = None
        error: Exception | None = None
        try:
            mine = look()
        except Exception as caught:
            error = caught
        told = self._group.all_gather_object(mine and mine[1])
        if mine is None or None in told:
            self._fail(error)
        assert mine is not None
        return mine[0], told

    @contextmanager
    def next(self) -> Iterator[None]:
        """Run the body."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if on_any(error is not None, group=self._group):
            self._fail(error)

    def _fail(self, error: Exception | None) -> None:
        """Raise on every rank, one of which comes with an error."""
        with together(self._task, group=self._group, raises=CheckpointError):
            if error is not None:
                raise error


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

    def __init__(self, memory: Memory, steps: _Steps, group: Group) -> None:
        self._memory, self._steps, self._group = memory, steps, group

    def fill(self, make_plan: Callable[[], list[LoadRound]], finish: Callable[[], None]) -> None:
        """Read, look, send and receive, round by round, and then ``finish``."""
        with self._steps.next():
            plan = make_plan()
            self._memory.prepare(plan)
            exchange = self._read(plan[0]) if plan else None
            if not plan:
                finish()
        for work, following in pairwise([*plan, None]):
            assert exchange is not None and work is not None
            exchange.send()
            # What others see in this rank's window they take while it reads the next round.
            with self._steps.next():
                self._memory.take(work)
                exchange.unpack()
                self._memory.settle()
                if following is None:
                    finish()
                else:
                    exchange = self._read(following)

    def _read(self, work: LoadRound) -> Exchange:
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
