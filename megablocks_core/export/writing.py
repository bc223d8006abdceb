"""A folder written by all ranks of a group, of tensors that lie on any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megablocks_core.export.drafting import FolderDraft
from megablocks_core.export.ours import Visited
from megablocks_core.groups import Group, together


def write_folder(
    draft: FolderDraft,
    collection: Visited,
    beside: Callable[[], Mapping[str, bytes]],
    *,
    group: Group,
    task: str,
) -> None:
    """Write the files of ``draft`` and let the folder appear; every rank calls it.

    What is not whole in the end is deleted. Sends the boxes that ranks lack, see ``Collection``.

    Args:
        draft: The same on every rank, but for ``rank``.
        collection: What ranks hold.
        beside: Gives the files beside the tensors; the first rank alone calls it, at the end.
        group: All ranks that hold a part.
        task: What to call the work in an error.
    """
    try:
        with together(task, group=group):
            if group.rank == 0:
                draft.open()
        draft.staging = group.all_gather_object(draft.staging)[0]
        collection.visit(draft.wanted(), draft.add)
        # What the first rank has published cannot be taken back by Ctrl-C on another.
        with together(task, group=group, interruptible=False):
            if group.rank == 0:
                draft.publish(beside())
    finally:
        draft.close()
