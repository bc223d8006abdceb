"""What stands beside a dataset that was made of others: which, and by what command.

``PREFIX.source.json``, whose ``build`` is that of ``PREFIX.manifest.json``: a record of another
build is of what stood there before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megablocks_core import __version__
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.tools.inspecting import SOURCE
from megablocks_core.files import replace_file

FORMAT_VERSION = 1


def write_source(
    prefix: str,
    tool: str,
    parts: Sequence[IndexedDataset],
    *,
    command_line: Sequence[str],
    facts: dict[str, Any] | None = None,
) -> None:
    """Record what the dataset that was just published under ``prefix`` was made of.

    Args:
        prefix: Of the new dataset.
        tool: Its name.
        parts: What it was made of.
        command_line: That made it.
        facts: More that the tool was told.
    """
    built = IndexedDataset(prefix).manifest
    record = {
        "format": f"megablocks_core.data.tools.{tool}",
        "version": FORMAT_VERSION,
        "megablocks_core": __version__,
        "build": built.build if built else None,
        "command_line": list(command_line),
        **(facts or {}),
        "parts": [_part(part) for part in parts],
    }
    replace_file(Path(prefix + SOURCE), json.dumps(record, indent=1).encode() + b"\n")


def refuse_inputs(out: str, inputs: Sequence[IndexedDataset]) -> None:
    """Refuse to write over what is read.

    Raises:
        ValueError: ``out`` is the prefix of an input, or its files are the same.
    """
    for one in inputs:
        if out == one.prefix or _same(Path(out + ".bin"), Path(one.token_path)):
            raise ValueError(f"out={out!r} must not be an input")


def _part(dataset: IndexedDataset) -> dict[str, Any]:
    """What names a dataset and its content; the fingerprint stands for hashes it has not."""
    manifest = dataset.manifest
    files = {name: one._asdict() for name, one in manifest.files.items()} if manifest else None
    return {
        "prefix": dataset.prefix,
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "fingerprint": dataset.fingerprint,
        "files": files,
    }


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
