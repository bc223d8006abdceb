"""A finished run becomes a dataset, with a manifest of where it came from.

``PREFIX.source.json`` names the inputs with their sizes and hashes, the tokenizer, the command
line and the counts. Its ``build`` is that of ``PREFIX.manifest.json``, which hashes the dataset.
An input's ``xxh3_128_of_pieces`` is the xxh3-128 of the xxh3-128 digests of its pieces of
``piece_bytes``, so that it was hashed by whoever read each piece.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megablocks_core import __version__
from megablocks_core.data.index_file import write_index
from megablocks_core.data.manifest import SUFFIX, FileRecord, Manifest, parse_manifest
from megablocks_core.data.publish import Staging
from megablocks_core.data.tokenize.staged import Staged
from megablocks_core.files import replace_file

SOURCE, BAD = ".source.json", ".bad.jsonl"
FORMAT, FORMAT_VERSION = "megablocks_core.data.tokenize", 1


def is_published(staged: Staged, prefix: str) -> bool:
    """Whether the dataset of a run is there, and only its folder was not removed yet."""
    with suppress(FileNotFoundError, ValueError), open(prefix + SUFFIX, "rb") as file:
        return bool(staged.build) and parse_manifest(file.read(), prefix).build == staged.build
    return False


def publish(staged: Staged, prefix: str, *, overwrite: bool) -> None:
    """Put the dataset in place, whole or not at all."""
    files = Staging(prefix, overwrite=overwrite)
    try:
        dtype = np.dtype(staged.recipe["dtype"])
        tokens = files.adopt(".bin", staged.path("tokens"), staged.hash)
        lengths, hashes = _column(staged, "lengths", "<i4"), _column(staged, "hashes", "<u8")
        bounds = np.arange(len(lengths) + 1, dtype=np.int64)
        write_index(files.create(".idx"), dtype, lengths, bounds, None)
        files.create(".hashes").write(hashes.view(np.uint8).data)

        def manifest(records: dict[str, FileRecord]) -> Manifest:
            return Manifest(
                build=files.build,
                dtype=dtype.name,
                num_sequences=len(lengths),
                num_documents=len(lengths),
                num_tokens=tokens.record().size // dtype.itemsize,
                tokenizer=staged.recipe["tokenizer"],
                files=records,
            )

        staged.commit(files.build)
        files.publish(manifest, grown=False)
    finally:
        files.discard()


def conclude(staged: Staged, prefix: str, *, command_line: Sequence[str], list_bad: bool) -> None:
    """Write what stands beside a published dataset, and remove the folder of the run."""
    bad = staged.path("bad")
    if not list_bad:
        Path(prefix + BAD).unlink(missing_ok=True)
    elif bad.exists():
        os.replace(bad, prefix + BAD)
    text = json.dumps(_source(staged, command_line), indent=1)
    replace_file(Path(prefix + SOURCE), text.encode() + b"\n")
    staged.remove()


def _source(staged: Staged, command_line: Sequence[str]) -> dict[str, Any]:
    recipe, counts = staged.recipe, asdict(staged.counts)
    piece = recipe["unit_bytes"]
    digests = staged.path("pieces").read_bytes()
    inputs, at = [], 0
    for path, size, changed, *_ in recipe["inputs"]:
        end = at + 16 * -(-size // piece)
        whole = xxhash.xxh3_128_hexdigest(digests[at:end])
        at = end
        inputs.append(
            {"path": path, "size": size, "modified_ns": changed, "xxh3_128_of_pieces": whole}
        )
    assert at == len(digests)
    kept = ("tokenizer", "tokenizer_spec", "engine", "end", "dtype", "key", "max_bytes")
    counted = ("documents", "tokens", "empty", "text_bytes", "inner_ends", "bad")
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "megablocks_core": __version__,
        "build": staged.build,
        "command_line": list(command_line),
        **{key: recipe[key] for key in kept},
        **{key: counts[key] for key in counted},
        "piece_bytes": piece,
        "inputs": inputs,
    }


def _column(staged: Staged, name: str, dtype: str) -> np.ndarray:
    path = staged.path(name)
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
