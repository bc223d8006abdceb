"""Delete old checkpoints, and what killed saves left."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.newest import survey
from megablocks_core.ckpt.places import below, place_of
from megablocks_core.groups import LOCAL, Group, together


def prune(
    root: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    leftovers: bool = False,
    group: Group = LOCAL,
) -> list[Path | str]:
    """Delete checkpoints under ``root`` that are not to be kept, oldest first.

    The newest whole checkpoint always stays, and so does every folder that is not a whole
    checkpoint. A folder loses its name before its files go, so that no part of one is ever found.

    Args:
        root: The folder of the checkpoints' folders.
        keep_last: Keep this many of the newest whole ones; by default all, or one with
            ``keep_every``.
        keep_every: Keep those whose number, the last in the folder's name, is a multiple of
            this, and those without a number.
        leftovers: Delete, too, what killed saves left. No save may be going on under ``root``.
        group: Ranks that call this; the first one deletes.

    Returns:
        What was deleted.

    Raises:
        ValueError: ``keep_last`` or ``keep_every`` is less than 1.
        CheckpointError: Another rank failed, or there are folders but no whole checkpoint.
        OSError: A folder cannot be deleted.
    """
    for what, count in (("keep_last", keep_last), ("keep_every", keep_every)):
        if count is not None and count < 1:
            raise ValueError(f"{what}={count} must be at least 1")
    removed: list[Path | str] = []
    with together(f"prune({str(root)!r})", group=group, raises=CheckpointError):
        if group.rank == 0:
            place = place_of(root)
            names = place.leftovers() if leftovers else []
            if keep_last is not None or keep_every is not None:
                names += _old(survey(place).whole[keep_last or 1 :], keep_every)
            for name in names:
                with suppress(FileNotFoundError):  # another one pruned it
                    place.remove(name)
                    removed.append(below(root, name))
    return group.broadcast_object(removed)


def _old(names: list[str], keep_every: int | None) -> list[str]:
    """Those to delete of ``names``, oldest first."""
    found = []
    for name in reversed(names):
        numbers = re.findall(r"\d+", name)
        if keep_every is None or (numbers and int(numbers[-1]) % keep_every):
            found.append(name)
    return found
