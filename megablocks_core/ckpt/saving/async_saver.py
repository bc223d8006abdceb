"""Save beside training: copied at once, written by a thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import nn

from megablocks_core.ckpt.arguments import check_state, short
from megablocks_core.ckpt.format.file_names import check_files
from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.places.places import above
from megablocks_core.ckpt.saving.retention import check_keep
from megablocks_core.ckpt.saving.saving import save_entries
from megablocks_core.ckpt.state.entries import Entries, take_apart
from megablocks_core.ckpt.state.host_copies import HostCopies
from megablocks_core.groups import LOCAL, Group, check_group, marks, together

_OWN = "Mesh(timeout=timedelta(minutes=30)).group('dp') makes one of the whole world"


class AsyncSaver:
    """Saves checkpoints while training goes on; one at a time.

    ``save`` returns once the state is copied to host memory, which is used again by the next
    one, and which no later change of the state reaches. A thread does the rest as ``ckpt.save``
    does, with the same messages over ``group``. An error of it raises on every rank, at the next
    call of ``save``, ``wait`` or ``close``. The interpreter does not end before the thread has.

    As a context manager it waits at the end; if the body raised, it abandons first.

    Args:
        group: All ranks that hold a part of the state, in a group that nothing else uses, since
            its messages come at any time: one of a mesh of its own. For the whole world that is
            ``Mesh(timeout=timedelta(minutes=30)).group("dp")``; without a timeout of its own a
            mesh shares the default process group.
        on_durable: Called in the thread with a checkpoint's path, once it is durable; what it
            raises on one rank is raised on all, as an error of the save is.

    Raises:
        ValueError: ``group`` is none, or the default process group, which training uses, or
            ``on_durable`` cannot be called.
    """

    def __init__(
        self, *, group: Group = LOCAL, on_durable: Callable[[str], None] = lambda _: None
    ) -> None:
        check_group(group)
        if not callable(on_durable):
            raise ValueError(f"on_durable={short(on_durable)} must be a function of a path")
        if group.size > 1 and group.pg is dist.group.WORLD:
            raise ValueError(
                f"group= is the default process group, must be one that nothing else uses: {_OWN}"
            )
        self._group, self._on_durable = group, on_durable
        self._copies = HostCopies()
        self._thread: Thread | None = None
        self._abandoned = Event()
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is still being written on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        files: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        """Copy ``state`` and begin to write it as the checkpoint ``path``.

        Waits for the save before, if it is still being written.

        Args:
            path: As for ``ckpt.save``; so are the others.
            state: What is copied before this returns.
            files: JSON values to write beside the tensors.
            keep_last: Older checkpoints to keep once this one is durable.
            keep_every: As for ``prune``.

        Raises:
            ValueError: An argument is wrong, or ``state`` holds what cannot be saved. Other
                ranks hear of it at their next call.
            Exception: What the save before raised; this one was not begun.
        """
        self.wait()
        error: Exception | None = None
        entries = Entries()
        try:
            above(path)
            check_keep(keep_last, keep_every)
            check_files({} if files is None else files)
            files = deepcopy(files)
            check_state(state)
            self._refuse_shared_group(state)
            entries = self._copies.take(take_apart(state, group=self._group))
        except Exception as caught:
            error = caught

        def entries_of() -> Entries:
            if error is not None:
                raise error
            return entries

        def write() -> None:
            try:
                save_entries(
                    path,
                    entries_of,
                    group=self._group,
                    files=files,
                    keep_last=keep_last,
                    keep_every=keep_every,
                    checked=self._check,
                )
                task = f"on_durable({str(path)!r})"
                with together(task, group=self._group, raises=CheckpointError):
                    self._on_durable(str(path))
            except BaseException as caught:
                self._error = caught

        self._thread = Thread(target=write, name=f"save({str(path)!r})")
        self._thread.start()
        if error is not None:
            self._thread.join()
            self._error = None
            raise error

    def wait(self) -> None:
        """Return once nothing is being written.

        Raises:
            Exception: What the last save raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Give up the save that is being written, on all ranks; return once it has ended.

        Nothing of it is left, unless it was about to be durable: then it is.
        """
        self._abandoned.set()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            self._thread = self._error = None
            self._abandoned.clear()

    def close(self) -> None:
        """``wait``; the saver keeps no memory."""
        try:
            self.wait()
        finally:
            self._copies = HostCopies()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abandon()
        self.close()

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise CheckpointError("the save was abandoned")

    def _refuse_shared_group(self, state: Mapping[str, Any]) -> None:
        """Refuse a group that ``state`` shows to be in use."""
        for entry, value in state.items() if self._group.size > 1 else ():
            for what, used in _groups_in_use(value):
                if used == self._group or used is self._group.pg:
                    raise ValueError(
                        f"group= {what.format(entry)}, must be one that nothing else uses: {_OWN}"
                    )


def _groups_in_use(value: Any) -> Iterator[tuple[str, Group | dist.ProcessGroup]]:
    """Groups that a module or optimizer sends over, each with what it is to them.

    Those of marks, of the meshes of DTensors, and those that modules and optimizers keep, such as
    torch's ``DistributedDataParallel``.
    """
    holders: Iterable[Any] = (value,)
    if isinstance(value, nn.Module):
        holders = value.modules()
        for name, parameter, specs in marks(value):
            for spec in specs:
                yield f"cuts {{}}/{name}", spec.group
            mesh = getattr(parameter, "device_mesh", None)
            for used in mesh.get_all_groups() if mesh is not None else ():
                yield f"is of the mesh of {{}}/{name}", used
    for holder in holders:
        for attribute, used in getattr(holder, "__dict__", {}).items():
            if isinstance(used, Group | dist.ProcessGroup):
                yield f"is {attribute} of a {type(holder).__name__} in {{}}", used
