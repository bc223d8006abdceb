"""Saves on the disks of the hosts themselves, each part on several, beside shared storage."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from megablocks_core.ckpt.arguments import check_count, check_path, short
from megablocks_core.ckpt.local_tier.hosts import partners
from megablocks_core.ckpt.local_tier.loading import load_newest_parts
from megablocks_core.ckpt.local_tier.saving import save_parts
from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.places.places import is_url
from megablocks_core.ckpt.plans.rounds import BUCKET_BYTES
from megablocks_core.groups import LOCAL, Group, check_group, together


class LocalTier:
    """Quick saves that outlive the loss of ``copies`` hosts without shared storage.

    Every rank writes all that it holds into a folder of its host, and the same bytes into the
    folders of ranks on ``copies`` other hosts. A run of the same layout resumes from it: a rank
    whose folder is gone, or damaged, gets its part from one that has a copy. What several ranks
    hold is not compared, and each gets back its own. For another layout, and for keeps, there are
    ``save`` and ``load``.

    Sent in ``save``: each part to ``copies`` ranks, a bounded bucket at a time, and a few small
    messages of all. In ``load_newest``: the parts that a rank has not itself. The constructor
    sends one small message of all.

    Args:
        folder: On a disk of this host, or in its memory (tmpfs); may differ between ranks. The
            ranks of a host may share one; no two hosts, and no two tiers, may. Made if missing.
        group: All ranks that hold a part of the state; it may be one that training uses.
        copies: On how many other hosts each part is kept, too.
        hosts: For each rank the name of what fails at once with it: its host, or its rack. By
            default the host names, which the ranks exchange.
        keep_last: How many of the last saves stay; one more is there while one is made.

    Raises:
        ValueError: ``folder`` is no path of this host, ``copies`` is not below the number of
            hosts, ``hosts`` has not one name a rank, ``keep_last`` is no whole number from 1 on,
            or ranks differ in these.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        group: Group = LOCAL,
        copies: int = 1,
        hosts: Sequence[str] | None = None,
        keep_last: int = 1,
    ) -> None:
        check_group(group)
        with together("LocalTier", group=group, raises=CheckpointError):
            check_path(folder, "folder")
            if is_url(folder):
                raise ValueError(f"folder={str(folder)!r} must be a path on this host, no URL")
            check_count(keep_last, "keep_last")
            if type(copies) is not int:
                raise ValueError(f"copies={short(copies)} must be an int")
            _check_hosts(hosts, group.size)
        mine = (copies, keep_last, None if hosts is None else list(hosts), socket.gethostname())
        said = group.all_gather_object(mine)
        for rank, other in zip(group.ranks, said, strict=True):
            if other[:3] != said[0][:3]:
                raise ValueError(
                    "copies, keep_last and hosts must be the same on all ranks: rank "
                    f"{group.ranks[0]} has {said[0][:3]}, rank {rank} has {other[:3]}"
                )
        self._partners = partners(hosts or [name for *_, name in said], copies)
        self._folder = LocalPlace(Path(folder).absolute())
        self._group, self._keep_last = group, keep_last
        self._limit = BUCKET_BYTES // (copies + 1)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write ``state`` on all hosts; once this returns, ``load_newest`` finds it.

        Until then the save before stays. An error on one rank raises on all.

        Args:
            step: What ``load_newest`` returns.
            state: As for ``ckpt.save``.

        Raises:
            ValueError: ``step`` is no number from 0 on or not the same on all ranks, ``state``
                holds what cannot be saved, or hosts share ``folder``.
            CheckpointError: Another rank failed, or a copy is not what was sent.
            OSError: A disk is full, or another fault of a file system.
        """
        save_parts(
            self._folder,
            step,
            state,
            group=self._group,
            partners=self._partners,
            keep_last=self._keep_last,
            limit=self._limit,
        )

    def load_newest(self, state: MutableMapping[str, Any]) -> int | None:
        """Fill ``state`` from the newest save of which each part is whole in some folder.

        Every block is checked. A damaged part is replaced by a copy, a save that cannot be read
        by the one before it, with a warning. The next ``save`` makes the lost copies again.

        Args:
            state: What was saved, by the same ranks at the same layout.

        Returns:
            The step, or ``None`` if no folder has any part: nothing was saved, or all is lost.

        Raises:
            ValueError: ``state`` or the number of ranks is not what was saved; nothing changed.
            CheckpointError: There are parts, but too many are lost or damaged. If damage showed
                only while tensors were read, ``state`` is partly filled.
        """
        return load_newest_parts(self._folder, state, group=self._group, limit=self._limit)


def _check_hosts(hosts: Any, size: int) -> None:
    if hosts is None:
        return
    named = isinstance(hosts, Sequence) and not isinstance(hosts, str)
    if not named or len(hosts) != size or not all(isinstance(name, str) for name in hosts):
        raise ValueError(f"hosts={short(hosts)} must name a host for {size} ranks")
