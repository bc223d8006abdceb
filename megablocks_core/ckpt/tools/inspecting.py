"""What is in a checkpoint: entries, tensors, files, metadata. No tensor is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from megablocks_core.ckpt.manifest import FORMAT, CheckpointError
from megablocks_core.ckpt.tools.checkpoint import Held
from megablocks_core.ckpt.tools.dcp_reading import DcpFolder
from megablocks_core.ckpt.tools.opening import open_folder
from megablocks_core.files.progress import size_text
from megablocks_core.files.safetensors import DTYPE_CODES


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the checkpoint ``path``, of this library or torch's DCP, says of itself.

    Returns:
        ``path``, ``format``, ``metadata``, ``entries`` (kind and JSON value by name),
        ``tensors`` (dtype, shape and bytes by name) and ``files`` (bytes by name); in a DCP
        names are torch's keys.

    Raises:
        CheckpointError: It is no checkpoint, or damaged.
    """
    checkpoint = open_folder(path)
    if isinstance(checkpoint, DcpFolder):
        return {"path": str(path), "format": "torch DCP", **_dcp(checkpoint)}
    manifest = checkpoint.manifest
    seconds = manifest.saved_unix_ns / 1e9
    return {
        "path": str(path),
        "format": FORMAT,
        "metadata": {
            "saved": datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds"),
            "saved_unix_ns": manifest.saved_unix_ns,
            "xxh3_128": manifest.digest,
        },
        "entries": manifest.state,
        "tensors": {name: _tensor(held) for name, held in checkpoint.tensors.items()},
        "files": {name: record.size for name, record in manifest.files.items()},
    }


def inspect_text(found: dict[str, Any]) -> Iterator[str]:
    """What ``inspect`` found, as lines for people."""
    total = sum(tensor["bytes"] for tensor in found["tensors"].values())
    yield f"{found['path']}: {found['format']}, {len(found['tensors'])} tensors, {size_text(total)}"
    yield from (f"  {key}: {value}" for key, value in found["metadata"].items())
    yield "entries"
    for name, entry in found["entries"].items():
        value = f"  {json.dumps(entry['value'])}" if "value" in entry else ""
        yield f"  {name}  {entry['kind']}{value}"
    yield "tensors"
    for name, one in found["tensors"].items():
        yield f"  {name}  {one['dtype']} {one['shape']}  {size_text(one['bytes'])}"
    yield "files"
    yield from (f"  {name}  {size_text(size)}" for name, size in found["files"].items())


def _tensor(held: Held) -> dict[str, Any]:
    code = DTYPE_CODES[held.dtype]
    return {"dtype": code, "shape": list(held.shape), "bytes": held.nbytes}


def _dcp(folder: DcpFolder) -> dict[str, Any]:
    return {
        "metadata": {},
        "entries": {key: _object(folder, key) for key in folder.index.objects},
        "tensors": {key: _tensor(held) for key, held in folder.index.tensors.items()},
        "files": folder.files(),
    }


def _object(folder: DcpFolder, key: str) -> dict[str, Any]:
    """An object that is no tensor; one that JSON has no form for is only named."""
    try:
        value = folder.object(key)
        json.dumps(value)
    except CheckpointError:
        return {"kind": "a pickle that is not read"}
    except (TypeError, ValueError, RecursionError):
        return {"kind": type(value).__name__}
    return {"kind": "json", "value": value}
