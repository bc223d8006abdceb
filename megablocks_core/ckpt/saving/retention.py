"""Delete old checkpoints, and what killed saves left."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from megablocks_core.ckpt.arguments import check_count, check_path
from megablocks_core.ckpt.loading.newest import survey
from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.places.places import Place, below, root_of
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
    checkpoint, and every link to one. A folder loses its name before its files go, so that no
    part of one is ever found.

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
        ValueError: ``root`` is no folder, or ``keep_last`` or ``keep_every`` no count from 1 on.
        CheckpointError: Another rank failed, or there are folders but no whole checkpoint.
        OSError: A folder cannot be deleted.
    """
    removed: list[str] = []
    with together(f"prune({str(root)!r})", group=group, raises=CheckpointError):
        check_keep(keep_last, keep_every)
        check_path(root, "root")
        if group.rank == 0:
            place = root_of(root)
            names = place.leftovers() if leftovers else []
            removed = _removed(place, names + outdated(place, keep_last, keep_every))
    return [below(root, name) for name in group.broadcast_object(removed)]


def check_keep(keep_last: int | None, keep_every: int | None) -> None:
    """Refuse what are no counts from 1 on with a ``ValueError``."""
    for name, count in (("keep_last", keep_last), ("keep_every", keep_every)):
        if count is not None:
            check_count(count, name)


def outdated(root: Place, keep_last: int | None, keep_every: int | None) -> list[str]:
    """Names of the checkpoints under ``root`` that ``prune`` deletes, oldest first."""
    if keep_last is None and keep_every is None:
        return []
    found = []
    whole = [name for name in survey(root).whole if not root.is_link(name)]
    for name in reversed(whole[keep_last or 1 :]):
        numbers = re.findall(r"\d+", name)
        if keep_every is None or (numbers and int(numbers[-1]) % keep_every):
            found.append(name)
    return found


def _removed(root: Place, names: list[str]) -> list[str]:
    """Delete folders; those that were still there."""
    removed = []
    for name in names:
        with suppress(FileNotFoundError):  # another one pruned it
            root.remove(name)
            removed.append(name)
    return removed
