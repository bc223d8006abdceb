"""Write a checkpoint: planned, brought together in rounds, hashed, synced, and committed last."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from megablocks_core.ckpt.format.file_names import FileNames
from megablocks_core.ckpt.format.writing import Writer
from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.plans.boxes import split, whole_box
from megablocks_core.ckpt.plans.outlines import Holding, Packed, holdings, pack
from megablocks_core.ckpt.plans.replicas import Replicas
from megablocks_core.ckpt.plans.rounds import BUCKET_BYTES
from megablocks_core.ckpt.plans.save_plan import Round, SavePlan, Whole, plan_save
from megablocks_core.ckpt.saving.commit import Draft
from megablocks_core.ckpt.state.entries import Entries, merge_states, take_apart
from megablocks_core.ckpt.state.shares import Share
from megablocks_core.ckpt.transfer.exchange import Exchange
from megablocks_core.ckpt.transfer.gathering import all_texts
from megablocks_core.groups import LOCAL, Group, as_bytes, interrupts_held, together
from megablocks_core.groups.cuts import Box


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    group: Group = LOCAL,
    files: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> None:
    """Write ``state`` as the checkpoint ``path``; it is durable once this returns.

    Tensors of modules, and tensors of their own, are written whole: one rank among those that
    hold a part of one brings it together, the others send it theirs, each element once, a bounded
    bucket at a time. State of optimizers is written as it lies, each element by one rank that
    holds it. An error on one rank raises on all, and so does Ctrl-C on one; then nothing stands
    under ``path``, and earlier checkpoints and ``LATEST`` are as they were. Once the checkpoint is
    being committed, Ctrl-C waits until it stands.

    Args:
        path: The checkpoint's folder: new, or empty. Its parent, made if missing, holds LATEST.
            A path, or a URL that fsspec knows.
        state: By name, a module, an optimizer of modules in ``state`` (torch's, or one that
            publishes ``logical_state()``), a tensor, or a JSON value. What several ranks hold
            must be equal.
        group: All ranks that hold a part of ``state`` (usually the world).
        files: JSON values to write beside the tensors, by file name; the first rank's are taken.
            With ``config.json`` and an entry called "model" the folder opens in transformers.
        keep_last: Once this checkpoint is durable, delete older ones as ``prune`` does.
        keep_every: As for ``prune``.

    Raises:
        ValueError: ``path`` is not empty, or ``state`` holds what cannot be saved (of another
            kind, different between ranks, on ranks outside ``group``, held by no rank).
        CheckpointError: Another rank failed.
        OSError: The disk is full, or another fault of the file system.
    """
    save_entries(
        path,
        lambda: take_apart(state, group=group),
        group=group,
        files=files,
        keep_last=keep_last,
        keep_every=keep_every,
    )


def save_entries(
    path: str | os.PathLike[str],
    entries_of: Callable[[], Entries],
    *,
    group: Group,
    files: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    checked: Callable[[], None] = lambda: None,
) -> None:
    """Write what ``entries_of()`` gives, as ``save`` does.

    Whatever ``entries_of`` raises on one rank, and ``checked`` between two rounds, raises on all.
    """
    with interrupts_held(group=group):
        _save(
            path,
            entries_of,
            group=group,
            files=files,
            keep_last=keep_last,
            keep_every=keep_every,
            checked=checked,
        )


def _save(
    path: str | os.PathLike[str],
    entries_of: Callable[[], Entries],
    *,
    group: Group,
    files: Mapping[str, Any] | None,
    keep_last: int | None,
    keep_every: int | None,
    checked: Callable[[], None],
) -> None:
    task = f"save({str(path)!r})"
    with together(task, group=group, raises=CheckpointError):
        entries = entries_of()
        outlines = pack([share.outline for share in entries.shares])
        state = json.dumps(entries.state).encode()
    texts = all_texts([state, *outlines], group=group)
    with together(task, group=group, raises=CheckpointError):
        states = {text: json.loads(text) for text, *_ in texts}
        merged = merge_states([states[text] for text, *_ in texts])
        tensors = holdings([Packed(header, ends) for _, header, ends in texts])
        plan = plan_save(tensors, group.rank, num_ranks=group.size)
        names = FileNames(plan.homes)
        beside = names.beside({} if files is None else files, tensors)
        draft = Draft(path, group=group, keep_last=keep_last, keep_every=keep_every)
    work = _Work(entries, plan, names, task, group, checked)
    work.compare(tensors)
    try:
        writer = draft.open(names.files(plan, group.rank))
        work.write(writer)
        with work.together():
            receipt = writer.finish()
        draft.commit(merged, receipt, files=beside)
    finally:
        draft.discard()


class _Work:
    """One rank's part of a save."""

    def __init__(
        self,
        entries: Entries,
        plan: SavePlan,
        names: FileNames,
        task: str,
        group: Group,
        checked: Callable[[], None],
    ) -> None:
        self._shares = {share.name: share for share in entries.shares}
        self._plan, self._names, self._task, self._group = plan, names, task, group
        self._checked = checked
        # Tensors that are being brought together.
        self._growing: dict[str, Tensor] = {}

    def together(self) -> AbstractContextManager[None]:
        return together(self._task, group=self._group, raises=CheckpointError)

    def compare(self, tensors: Sequence[Holding]) -> None:
        """Refuse what several ranks hold and is not equal: only one copy is written.

        Raises:
            ValueError: On every rank.
        """
        if self._group.size == 1:
            return
        with self.together():
            replicas = Replicas(tensors)
            cells = replicas.of(self._group.rank)
            mine = [_hash(self._shares[name], box) for name, box in cells]
        hashes = self._group.all_gather_object(np.array(mine, dtype=np.uint64).tobytes())
        different = replicas.different([np.frombuffer(one, dtype=np.uint64) for one in hashes])
        if different:
            texts = [
                f"{name} on ranks {self._group.ranks[one]} and {self._group.ranks[other]}"
                for name, one, other in different[:3]
            ]
            raise ValueError(
                f"{self._task}: what several ranks hold must be equal; {len(different)} tensors "
                f"differ: {', '.join(texts)}"
            )

    def write(self, writer: Writer) -> None:
        """Bring tensors together, round by round, and write them; then what needs no exchange."""
        done: tuple[Round, Exchange] | None = None
        for work in self._plan.rounds:
            with self.together():
                self._checked()
                if done is not None:
                    self._complete(*done, writer)
                exchange = self._exchange(work)
            exchange.send()
            done = (work, exchange)
        with self.together():
            self._checked()
            if done is not None:
                self._complete(*done, writer)
            for (tensor, box), (file, key) in zip(
                self._plan.pieces, self._names.keys(self._plan, self._group.rank), strict=True
            ):
                writer.add(file, key, self._shares[tensor.name].view(box))

    def _exchange(self, work: Round) -> Exchange:
        outgoing: dict[int, list[Tensor]] = {}
        incoming: dict[int, list[Tensor]] = {}
        for name, box, peer in work.outgoing:
            outgoing.setdefault(peer, []).append(self._shares[name].view(box))
        for name, box, peer in work.incoming:
            incoming.setdefault(peer, []).append(self._whole(name)[box])
        return Exchange(outgoing, incoming, group=self._group)

    def _complete(self, work: Round, exchange: Exchange, writer: Writer) -> None:
        exchange.unpack()
        for whole in work.complete:
            name = whole.tensor.name
            writer.add(*self._names.place(name), self._finished(whole))

    def _finished(self, whole: Whole) -> Tensor:
        name, shape = whole.tensor.name, whole.tensor.shape
        share = self._shares[name]
        if whole.own == [whole_box(shape)]:
            return share.view(whole.own[0])
        tensor = self._whole(name)
        for box in whole.own:
            tensor[box] = share.view(box)
        return self._growing.pop(name)

    def _whole(self, name: str) -> Tensor:
        if name not in self._growing:
            share = self._shares[name]
            self._growing[name] = torch.empty(share.shape, dtype=share.dtype)
        return self._growing[name]


def _hash(share: Share, box: Box) -> int:
    digest = xxhash.xxh3_64()
    for part in split(box, BUCKET_BYTES // share.dtype.itemsize):
        digest.update(as_bytes(share.view(part).cpu()).numpy().data)
    return digest.intdigest()
