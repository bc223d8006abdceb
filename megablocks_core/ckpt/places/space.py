"""Is there room for a checkpoint? Asked before a byte of it is written."""

from __future__ import annotations

import errno

from megablocks_core.ckpt.places.places import Place


def check_space(place: Place, needed: int) -> None:
    """Check that ``needed`` bytes, those of all ranks together, fit where ``place`` lies.

    Quotas and other writers can still fill the disk later; then the write fails.

    Raises:
        OSError: They do not fit.
    """
    free = place.free_bytes()
    if free is not None and free < needed:
        raise OSError(
            errno.ENOSPC, f"No space left: {needed} bytes to write, {free} are free", str(place)
        )
