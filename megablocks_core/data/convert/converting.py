"""One format to another: documents stream from a source to a target that appears whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megablocks_core.data.checks import prefix_of, whole_number
from megablocks_core.data.convert import hf_folder, mds, olmo
from megablocks_core.data.convert.documents import Batch, Counts, Source, stored_as
from megablocks_core.data.convert.indexed_files import IndexedSource, write_indexed
from megablocks_core.data.convert.texts import TextSource
from megablocks_core.data.index_file import token_dtype
from megablocks_core.files import NewFolder
from megablocks_core.files.progress import Progress

IDX, HF, OLMO, MDS = "idx", "datasets", "olmo", "mds"
FORMATS = (IDX, HF, OLMO, MDS)
_SHARD_BYTES = {HF: hf_folder.SHARD_BYTES, OLMO: olmo.SHARD_BYTES, MDS: mds.SHARD_BYTES}
# Formats store what they can; of the rest, ids go where they most likely fit, and are checked.
_STORED = {
    IDX: {"uint32": "int32", "uint64": "int64"},
    OLMO: {"int8": "uint8", "int16": "uint16", "int32": "uint32", "int64": "uint32"},
}


@dataclass(frozen=True)
class ConvertReport:
    """What was written.

    Attributes:
        documents: How many.
        tokens: Of them.
        dtype: That they are stored in.
        files: Of tokens.
        empty: Texts without ids, which gave no document.
        joined: Documents that had several sequences, whose bounds are lost.
        unterminated: Files of OLMo whose last document has no end.
        ends_added: Documents that ``eos`` was put at the end of, as it was missing.
        inner_ends: How often ``eos`` stands inside documents: readers that cut at it see more.
    """

    documents: int
    tokens: int
    dtype: str
    files: int
    empty: int
    joined: int
    unterminated: int
    ends_added: int
    inner_ends: int


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    column: str | None = None,
    source_dtype: str | None = None,
    target_dtype: str | None = None,
    eos: int | None = None,
    tokenizer: str | None = None,
    append_eod: bool | int | str = False,
    shard_bytes: int | None = None,
    compression: str | None = None,
    overwrite: bool = False,
) -> ConvertReport:
    """Write the documents of ``source`` in the format of ``target``, in the same order.

    Each is the prefix of an indexed dataset, or ``datasets:FOLDER`` (Hugging Face, by
    ``save_to_disk``), ``olmo:PATH`` (a ``.npy`` file without header, or a folder of them) or
    ``mds:FOLDER`` (mosaicml-streaming). Ids are the same in every format, and their dtype where the
    format has it: uint32 is int32 in an indexed dataset, signed ones are unsigned in OLMo's files;
    an id that does not fit is refused. Memory is a small multiple of the longest document, or of
    a shard of MDS.

    The target appears whole or not at all. A kill leaves nothing under its name, and of a folder
    a hidden ``.NAME.*.partial`` beside it, to delete.

    Args:
        source: What to read.
        target: What to write; a folder must be new or empty.
        column: Of the source; by default ``input_ids``, ``tokens`` or ``text``.
        source_dtype: Of ids whose format does not say: OLMo's files, and bytes in MDS.
        target_dtype: To store ids in.
        eos: The id that ends documents in OLMo's files. Read, it cuts them, instead of the
            ``.csv.gz`` beside them; written, it is put at the end of documents without it.
        tokenizer: For a source of texts: ``bytes``, ``hf:PATH``, ``tiktoken:NAME`` or ``sp:PATH``.
        append_eod: End the documents of texts with its own end, or with this token or id.
        shard_bytes: Of a file of a target that is a folder.
        compression: Of MDS: ``zstd`` or ``zstd:LEVEL``.
        overwrite: Replace the indexed dataset that is there.

    Raises:
        BadSource: A ``ValueError``: the source is damaged, or an id does not fit the target.
        ValueError: An argument is wrong, or the source is of another kind.
        FileExistsError: A dataset stands under the prefix of the target.
        ModuleNotFoundError: A package that the format needs is missing.
        OSError: There is no room, or no permission.
    """
    from_kind, from_path = _format_of("source", source)
    kind, path = _format_of("target", target)
    if "://" in path:
        raise ValueError(f"target={path!r} must be on this machine")
    if compression is not None and kind != MDS:
        raise ValueError(f"compression={compression!r} is of mds: alone, not of {kind}:")
    mds.compression_level(compression)
    if overwrite and kind != IDX:
        raise ValueError(f"overwrite=True replaces an indexed dataset alone, not a {kind}: folder")
    size = _SHARD_BYTES.get(kind, 1) if shard_bytes is None else shard_bytes
    size = whole_number("shard_bytes", size, 1)
    eos = None if eos is None else whole_number("eos", eos)
    if column is not None and not isinstance(column, str):
        raise ValueError(f"column={column!r} must be the name of one")
    if kind == MDS and size >= 1 << 32:
        raise ValueError(f"shard_bytes={size} must be below 2**32 for mds:")
    if kind == from_kind == IDX and prefix_of(path) == prefix_of(from_path):
        raise ValueError(f"target={path!r} must be another than the source")
    if eos is not None and OLMO not in (kind, from_kind):
        raise ValueError(f"eos={eos} is of olmo: alone; documents have their bounds elsewhere")
    given = None if source_dtype is None else _dtype("source_dtype", source_dtype)
    opened = _open(from_kind, from_path, column, given, eos, tokenizer, append_eod)
    dtype = _target_dtype(kind, opened.dtype, target_dtype)
    counts = Counts()
    batches = _stored(opened, dtype, str(source), counts)
    if kind == OLMO and eos is not None:
        batches = olmo.with_ends(batches, eos, counts)
    batches = _counted(batches, counts, opened.nbytes)
    if kind == IDX:
        name = opened.tokenizer
        files = write_indexed(path, batches, dtype, tokenizer=name, overwrite=overwrite)
    else:
        write: Callable[..., int] = {
            HF: hf_folder.write_hf,
            OLMO: olmo.write_olmo,
            MDS: partial(mds.write_mds, compression=compression),
        }[kind]
        files = _write_folder(
            Path(path), lambda folder: write(folder, batches, dtype, size), f"{source} ({kind}:)"
        )
    return ConvertReport(dtype=dtype.name, files=files, **asdict(counts))


def _format_of(name: str, value: str | os.PathLike[str]) -> tuple[str, str]:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name}={value!r} must be a path, or a format and a path")
    kind, colon, path = text.partition(":")
    if colon and kind in FORMATS:
        if not path:
            raise ValueError(f"{name}={text!r} must have a path after {kind}:")
        return kind, path
    return IDX, text


def _open(
    kind: str,
    path: str,
    column: str | None,
    dtype: np.dtype | None,
    eos: int | None,
    tokenizer: str | None,
    append_eod: bool | int | str,
) -> Source:
    if kind == OLMO:
        source: Any = olmo.OlmoSource(Path(path), dtype, eos)
    elif kind == HF:
        source = hf_folder.HFFolder(Path(path), column)
    elif kind == MDS:
        source = mds.MDSFolder(Path(path), column, dtype)
    else:
        source = IndexedSource(path)
    if column is not None and kind not in (HF, MDS):
        raise ValueError(f"column={column!r} is of datasets: and mds:, not of {kind}:")
    if dtype is not None and kind in (IDX, HF):
        raise ValueError(f"source_dtype={dtype.name} is of olmo: and mds:; {kind}: says its own")
    if source.dtype is None:
        return TextSource(source.texts, source.nbytes, tokenizer, append_eod)
    if tokenizer is not None or append_eod is not False:
        raise ValueError(f"tokenizer={tokenizer!r} is for texts, and the source holds ids")
    return source


def _dtype(name: str, value: str) -> np.dtype:
    try:
        return np.dtype(value).newbyteorder("<")
    except TypeError:
        raise ValueError(f"{name}={value!r} must be a dtype such as uint16") from None


def _target_dtype(kind: str, source: np.dtype, given: str | None) -> np.dtype:
    name = _STORED.get(kind, {}).get(source.name, source.name) if given is None else given
    dtype = _dtype("target_dtype", name)
    if kind == IDX:
        return token_dtype(dtype)
    if kind == OLMO and dtype.name not in olmo.DTYPES:
        raise ValueError(f"target_dtype={dtype.name} must be one of {', '.join(olmo.DTYPES)}")
    if kind in (HF, MDS) and dtype.name not in mds.ARRAY_DTYPES:
        raise ValueError(f"target_dtype={dtype.name} must be one of {', '.join(mds.ARRAY_DTYPES)}")
    return dtype


def _stored(source: Source, dtype: np.dtype, place: str, counts: Counts) -> Iterator[Batch]:
    """The source's documents in small batches of another dtype."""
    nothing = Batch(np.empty(0, dtype), np.empty(0, np.int64), 0)
    for batch in source.batches(counts):
        for run in batch.runs():
            yield run._replace(tokens=stored_as(run.tokens, dtype, place))
        yield nothing._replace(nbytes=batch.nbytes)


def _counted(batches: Iterator[Batch], counts: Counts, nbytes: int) -> Iterator[Batch]:
    progress = Progress("convert", nbytes)
    try:
        for batch in batches:
            counts.documents += len(batch.lengths)
            counts.tokens += len(batch.tokens)
            progress.add(batch.nbytes)
            if len(batch.lengths):
                yield batch
    finally:
        progress.close()


def _write_folder(target: Path, write: Callable[[Path], int], named: str) -> int:
    folder = NewFolder(target)
    try:
        if not (files := write(folder.staging)):
            raise ValueError(f"{named}: has no documents, and a folder of none cannot be read")
        folder.publish()
    finally:
        folder.discard()
    return files
