"""Whether the files of a dataset are what was written: all faults, not the first alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from megablocks_core.data.checks import prefix_of, whole_number
from megablocks_core.data.content import hash_documents
from megablocks_core.data.index_file import fault_inside
from megablocks_core.data.indexed import CACHE_BYTES, IndexedDataset
from megablocks_core.data.manifest import SUFFIX, Manifest, parse_manifest
from megablocks_core.data.mapped import MappedFile, read_bytes
from megablocks_core.data.publish import open_ending
from megablocks_core.data.remote import RemoteFiles
from megablocks_core.data.tools.documents import TOKENS, pieces
from megablocks_core.files.progress import Progress

_AT_A_TIME = 1 << 24  # bytes


@dataclass(frozen=True)
class Verification:
    """What was found.

    Attributes:
        prefix: Of the files.
        faults: Each a sentence that names the file; none if all is well.
        hashed: Bytes that were compared with the manifest's hashes; 0 without a manifest.
    """

    prefix: str
    faults: list[str]
    hashed: int


def verify(
    prefix: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Look for every fault of a dataset: of its manifest, each file, the index, and the ids.

    Each file is compared with the size and hash in the manifest. Of the index, counts are compared
    with sizes and each entry with its neighbour. Where all hashes are right, the recorded
    content hashes are those of the documents. Where another tool wrote the files there is no
    manifest, and the index is compared with the tokens alone.

    Args:
        prefix: Of the files, or their URL.
        vocab_size: Every id must be below.
        progress: Told of the bytes hashed.
    """
    prefix = prefix_of(prefix)
    if vocab_size is not None:
        vocab_size = whole_number("vocab_size", vocab_size, 1)
    open_file, read_file = _files(prefix)
    faults: list[str] = []
    manifest = _manifest(prefix, read_file, faults)
    hashed = 0
    for ending in manifest.files if manifest else ():
        hashed += _compare(prefix, ending, manifest, open_file, faults, progress)
    try:
        dataset = IndexedDataset(prefix)
    except (ValueError, OSError) as error:
        if isinstance(error, ValueError) or not manifest:  # else the missing file was named above
            faults.append(str(error))
    else:
        _compare_inside(dataset, faults, vocab_size, deep=bool(manifest and faults))
    return Verification(prefix, list(dict.fromkeys(faults)), hashed)


def _files(prefix: str) -> tuple[Callable[[str], Any], Callable[[str], bytes]]:
    """What opens a file and what reads a small one, here or behind a URL."""
    if "://" not in prefix:
        return MappedFile, read_bytes
    files = RemoteFiles(prefix, storage_options=None, cache_bytes=CACHE_BYTES)
    return files.open, files.read


def _manifest(prefix: str, read_file: Callable[[str], bytes], faults: list[str]) -> Manifest | None:
    try:
        return parse_manifest(read_file(prefix + SUFFIX), prefix + SUFFIX)
    except FileNotFoundError:
        return None
    except ValueError as error:
        faults.append(str(error))
        return None


def _compare(
    prefix: str,
    ending: str,
    manifest: Manifest | None,
    open_file: Callable[[str], Any],
    faults: list[str],
    progress: Progress | None,
) -> int:
    """Compare a file with its record; return how many bytes were read."""
    assert manifest
    record, path = manifest.files[ending], prefix + ending
    try:
        file = open_ending(open_file, prefix, manifest.build, ending)
    except FileNotFoundError:
        faults.append(f"{path}: is missing, must hold {record.size} bytes")
        return 0
    found = xxhash.xxh3_128()
    for start in range(0, file.size, _AT_A_TIME):
        part = file.read(start, start + _AT_A_TIME)
        found.update(part)
        if progress:
            progress.add(len(part))
    if file.size != record.size:
        faults.append(f"{path}: holds {file.size} bytes, must hold {record.size}")
    elif found.hexdigest() != record.xxh3_128:
        faults.append(
            f"{path}: is of xxh3-128 {found.hexdigest()}, must be {record.xxh3_128} by "
            f"{prefix}{SUFFIX}"
        )
    return file.size


def _compare_inside(
    dataset: IndexedDataset, faults: list[str], vocab_size: int | None, *, deep: bool
) -> None:
    """Compare the entries of an index, ids with a vocabulary, and documents with their hashes."""
    if fault := fault_inside(dataset):
        faults.append(f"{dataset.index_path}: {fault}")
        return
    if vocab_size is not None:
        _compare_ids(dataset, faults, vocab_size)
    if deep:
        _name_changed_documents(dataset, faults)


def _compare_ids(dataset: IndexedDataset, faults: list[str], vocab_size: int) -> None:
    tokens: Any = dataset.tokens
    wrong, example = 0, None
    for first, last in pieces(0, dataset.num_tokens, tokens=4 * TOKENS):
        some = tokens[first:last]
        outside = (some < 0) | (some >= vocab_size)
        if outside.any():
            place = int(outside.argmax())
            example = example or (first + place, some[place])
            wrong += int(np.count_nonzero(outside))
    if example:
        faults.append(
            f"{dataset.token_path}: {wrong} tokens are no ids below vocab_size={vocab_size}; the "
            f"first is token {example[0]}, which is {example[1]}"
        )


def _name_changed_documents(dataset: IndexedDataset, faults: list[str]) -> None:
    """Say which documents are not what they were, where the recorded hashes can still be had."""
    try:
        recorded = dataset.content_hashes()
    except (ValueError, OSError):
        return  # that file is named already
    if recorded is None:
        return
    changed = np.flatnonzero(hash_documents(dataset) != recorded)
    if len(changed):
        faults.append(
            f"{dataset.token_path}: {len(changed)} documents are not what was written, the first "
            f"of them document {int(changed[0])}"
        )
