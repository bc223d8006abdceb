"""Several datasets as one, their documents in order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megablocks_core.data.builder import IndexedDatasetBuilder
from megablocks_core.data.checks import prefix_of, several
from megablocks_core.data.index_file import token_dtype
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.tools.documents import DamagedDataset, open_dataset, refuse_two_tokenizers
from megablocks_core.data.tools.records import refuse_inputs, write_source
from megablocks_core.files.progress import Progress


@dataclass(frozen=True)
class Merged:
    """What was written: its prefix, counts and dtype, and whether a part was of another dtype."""

    prefix: str
    parts: int
    documents: int
    tokens: int
    dtype: str
    widened: bool


def merge(
    prefixes: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    command_line: Sequence[str] = (),
    progress: Progress | None = None,
) -> Merged:
    """Write all documents of some datasets, in their order, as the dataset ``out``.

    Every entry and hash of a part is checked before it is copied. Parts of several dtypes are
    written in the smallest that holds the ids of all; where one has modes, those of others are 0.
    The dataset appears whole or not at all; then ``OUT.source.json`` records the hashes of the
    parts. Memory: 20 bytes a document.

    Args:
        prefixes: Of the parts.
        out: Of what is written.
        overwrite: Replace what stands there.
        command_line: Recorded.
        progress: Told of the bytes of tokens written.

    Raises:
        ValueError: There is no part, a part is ``out``, or the parts are of two tokenizers, or some
            of ids and some of floats.
        DamagedDataset: The files of a part are damaged.
        FileExistsError: A dataset stands under ``out``.
    """
    out = prefix_of(out)
    parts = [open_dataset(prefix) for prefix in several("prefixes", prefixes)]
    if not parts:
        raise ValueError("prefixes=[] must name at least one dataset")
    refuse_inputs(out, parts)
    refuse_two_tokenizers(parts)
    dtype = common_dtype(parts)
    multimodal = any(part.sequence_modes is not None for part in parts)
    with IndexedDatasetBuilder(out, dtype, overwrite=overwrite, multimodal=multimodal) as builder:
        for part in parts:
            try:
                builder.add_index(part.prefix)
            except ValueError as error:  # what else could be wrong was looked at before
                raise DamagedDataset(str(error)) from error
            if progress:
                progress.add(part.num_tokens * dtype.itemsize)
    write_source(out, "merge", parts, command_line=command_line)
    return Merged(
        prefix=out,
        parts=len(parts),
        documents=sum(part.num_documents for part in parts),
        tokens=sum(part.num_tokens for part in parts),
        dtype=dtype.name,
        widened=any(part.dtype != dtype for part in parts),
    )


def common_dtype(parts: Sequence[IndexedDataset]) -> np.dtype:
    """The smallest dtype of the format that holds the values of all parts.

    Raises:
        ValueError: Some hold integers and others floats.
    """
    names = {part.prefix: part.dtype.name for part in parts}
    if len({part.dtype.kind == "f" for part in parts}) > 1:
        raise ValueError(f"parts of {names} must all hold integers, or all floats")
    return token_dtype(np.result_type(*(part.dtype for part in parts)))
