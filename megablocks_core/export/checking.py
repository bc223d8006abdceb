"""Check a folder of any kind that is written here against what its config describes."""

from __future__ import annotations

import os
from collections.abc import Callable

from megablocks_core.export.arguments import folder_of
from megablocks_core.export.quantising.verifying import is_quantised, verify_quantised
from megablocks_core.export.trtllm.verifying import is_trtllm, verify_trtllm
from megablocks_core.export.verifying import verify as verify_plain


def verify(
    path: str | os.PathLike[str],
    *,
    values: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Check that a folder's files are whole and hold what its ``config.json`` describes.

    Args:
        path: The folder: of plain weights, or of quantised ones, then with all their scales; or a
            checkpoint of TensorRT-LLM.
        values: Look at values too, which must be finite, and scales above 0; else headers alone
            are read.
        progress: Called with the bytes of values looked at so far, and in all.

    Raises:
        ValueError: What is wrong, by name.
    """
    folder = folder_of(path)
    if is_trtllm(folder):
        verify_trtllm(folder, values=values, progress=progress)
        return
    check = verify_quantised if is_quantised(folder) else verify_plain
    check(path, values=values, progress=progress)
