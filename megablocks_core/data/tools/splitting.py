"""A dataset cut into several, such as one to train on and one to validate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from megablocks_core.data.builder import IndexedDatasetBuilder
from megablocks_core.data.checks import different_names, prefix_of, several
from megablocks_core.data.content import split_by_content
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.split import Split, split_documents
from megablocks_core.data.tools.documents import DOCUMENTS, DamagedDataset, bounds_of, open_dataset
from megablocks_core.data.tools.records import refuse_inputs, write_source
from megablocks_core.files.progress import Progress

DOCUMENT, PLACE = "document", "place"
WAYS = (DOCUMENT, PLACE)


@dataclass(frozen=True)
class Written:
    """One of the datasets written: its name, prefix, and counts."""

    name: str
    prefix: str
    documents: int
    tokens: int


def split(
    prefix: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    fractions: str | Sequence[float],
    seed: int = 0,
    names: Sequence[str] | None = None,
    by: str = DOCUMENT,
    overwrite: bool = False,
    command_line: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[Written]:
    """Write each document of a dataset to one of ``OUT-NAME``; they keep their order.

    ``by="document"`` goes by a hash of the seed and the document's ids (``split_by_content``):
    equal documents are in one split, and none moves when the corpus grows or is shuffled; the
    sizes are near the fractions, not exact. ``by="place"`` cuts the documents into consecutive
    ranges (``split_documents``).

    Tokens, sequences, modes and dtype are as in ``prefix``. Each dataset appears whole or not at
    all, once all are written; a kill between two of them leaves the first alone, whole.

    Args:
        prefix: Of what is split.
        out: What the new prefixes begin with.
        fractions: Of each split, such as ``"0.9,0.1"``; they are divided by their sum.
        seed: Of the hash.
        names: Of the splits, by default 0, 1 and so on.
        by: ``document`` or ``place``.
        overwrite: Replace what stands there.
        command_line: Recorded.
        progress: Told of the bytes of tokens written.

    Raises:
        ValueError: An argument is wrong, or one of the new datasets is the old one.
        DamagedDataset: Its files are damaged.
        FileExistsError: A dataset stands under one of the new prefixes.
    """
    if by not in WAYS:
        raise ValueError(f"by={by!r} must be one of {', '.join(WAYS)}")
    dataset = open_dataset(prefix)
    many = fractions.split(",") if isinstance(fractions, str) else several("fractions", fractions)
    many = list(many)
    chosen = different_names([str(n) for n in range(len(many))] if names is None else names)
    if len(chosen) != len(many):
        raise ValueError(f"names={chosen} must be one for each of the {len(many)} fractions")
    outs = {name: prefix_of(f"{os.fspath(out)}-{name}") for name in chosen}
    for one in outs.values():
        refuse_inputs(one, [dataset])
    try:
        split_documents(0, fractions, names=chosen)  # before all tokens are read
    except ValueError as error:
        raise ValueError(str(error).replace("weights=", "fractions=", 1)) from None
    try:
        dataset.verify()
    except ValueError as error:
        raise DamagedDataset(str(error)) from error
    if by == DOCUMENT:
        splits = split_by_content(dataset, fractions, names=chosen, seed=seed)
    else:
        splits = split_documents(dataset.num_documents, fractions, names=chosen)
    _write(dataset, splits, outs, overwrite, progress)
    facts = {"fractions": [float(one) for one in many], "seed": seed, "by": by, "names": chosen}
    written = []
    for name, one in outs.items():
        write_source(one, "split", [dataset], command_line=command_line, facts=facts)
        built = IndexedDataset(one)
        written.append(Written(name, one, built.num_documents, built.num_tokens))
    return written


def _write(
    dataset: IndexedDataset,
    splits: dict[str, Split],
    outs: dict[str, str],
    overwrite: bool,
    progress: Progress | None,
) -> None:
    """Write all splits aside, then publish one after the other."""
    modes = dataset.sequence_modes is not None
    tokenizer = dataset.manifest.tokenizer if dataset.manifest else None
    with ExitStack() as stack:
        builders = {}
        for name, prefix in outs.items():
            builders[name] = stack.enter_context(
                IndexedDatasetBuilder(
                    prefix,
                    dataset.dtype,
                    overwrite=overwrite,
                    multimodal=modes,
                    tokenizer=tokenizer,
                )
            )
        for name, builder in builders.items():
            for run in _runs(splits[name].documents):
                size = _copy(dataset, run, builder)
                if progress:
                    progress.add(size)


def _runs(documents: range | np.ndarray) -> Iterator[range]:
    """Documents as ranges of neighbours, none of too many."""
    for start in range(0, len(documents), DOCUMENTS):
        some = documents[start : start + DOCUMENTS]
        if isinstance(some, range):
            yield some
            continue
        ends = np.flatnonzero(np.diff(some) != 1) + 1
        for run in np.split(some, ends):
            yield range(int(run[0]), int(run[-1]) + 1)


def _copy(dataset: IndexedDataset, run: range, builder: IndexedDatasetBuilder) -> int:
    """Add neighbouring documents, with their sequences and modes; return the bytes of tokens."""
    bounds = bounds_of(dataset, run.start, run.stop).tolist()
    indices = np.asarray(dataset.document_indices[run.start : run.stop + 1])
    first, last = int(indices[0]), int(indices[-1])
    lengths = np.asarray(dataset.sequence_lengths[first:last]).tolist()
    modes = dataset.sequence_modes
    kinds = [0] * len(lengths) if modes is None else np.asarray(modes[first:last]).tolist()
    places = (indices - first).tolist()
    for number in range(len(run)):
        begin, end = places[number], places[number + 1]
        builder.add_document(
            dataset.tokens[bounds[number] : bounds[number + 1]],
            lengths[begin:end],
            kinds[begin:end],
        )
    return (bounds[-1] - bounds[0]) * dataset.dtype.itemsize
