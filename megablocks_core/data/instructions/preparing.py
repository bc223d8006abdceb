"""Instruction data to an indexed dataset that says of each token whether it is to be learnt."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from megablocks_core import __version__
from megablocks_core.data.builder import IndexedDatasetBuilder, smallest_dtype
from megablocks_core.data.checks import prefix_of, whole_number
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.instructions.encoding import (
    CONVERSATIONS,
    PREFERENCES,
    EncodedRows,
    Settings,
)
from megablocks_core.data.instructions.rows import Block, blocks, refuse_other_formats
from megablocks_core.data.instructions.schemas import AUTO, SCHEMAS
from megablocks_core.data.instructions.templates import (
    ALL,
    TRAIN_ON,
    ChatTemplate,
    open_template,
)
from megablocks_core.data.tokenize.encoders import open_encoder
from megablocks_core.data.tokenize.inputs import Input, find_inputs, refuse_changed
from megablocks_core.data.tokenize.pool import OwnProcess, Pool, Workers
from megablocks_core.data.tokenize.publication import BAD, SOURCE
from megablocks_core.data.tokenize.reading import BadText
from megablocks_core.data.tokenize.tokenizing import MAX_BYTES, POLICIES, REPORT, STOP
from megablocks_core.files import replace_file
from megablocks_core.files.progress import Progress

BLOCK_BYTES = 1 << 20
FORMAT, FORMAT_VERSION = "megablocks_core.data.instructions", 1
_HASHED = 1 << 24  # bytes at a time


@dataclass(frozen=True)
class InstructionReport:
    """What was written.

    Attributes:
        documents: Conversations and plain texts, or twice the pairs.
        tokens: Of them.
        learnt: Tokens that are to be predicted; the first of a document never is.
        longest: Tokens of the longest document.
        dtype: That they are stored in.
        schemas: How many rows had each schema.
        empty: Plain texts without tokens, which gave no document.
        control: Rows that themselves hold the text of a special token, which became that token.
        bad: How many rows gave nothing, by reason.
    """

    documents: int
    tokens: int
    learnt: int
    longest: int
    dtype: str
    schemas: dict[str, int]
    empty: int
    control: int
    bad: dict[str, int]


def prepare_conversations(
    inputs: Iterable[str | os.PathLike[str]],
    prefix: str | os.PathLike[str],
    *,
    tokenizer: str,
    template: str | Path | None = None,
    schema: str = AUTO,
    train_on: str = ALL,
    on_bad: str = STOP,
    workers: int | None = None,
    variables: Mapping[str, Any] | None = None,
    date: Any = None,
    max_bytes: int = MAX_BYTES,
    overwrite: bool = False,
) -> InstructionReport:
    """Write conversations as ``prefix.bin`` and ``prefix.idx``, each a document.

    A document's sequences alternate between what is given (mode 0) and what is to be learnt (mode
    1): the format's own way to say so, which other readers of it skip. Nothing is cut: how long
    a sample may be is decided where they are packed. The same bytes come of any number of
    workers; nothing has the name of a dataset before all of it is written.

    Args:
        inputs: Files and folders of ``.jsonl``, ``.json`` (a list) and ``.parquet``.
        prefix: Of the dataset.
        tokenizer: ``hf:PATH``, ``tiktoken:NAME``, ``sp:PATH`` or ``bytes``.
        template: The text of a chat template, or the path of its file; by default the one that
            comes with the tokenizer.
        schema: One of ``SCHEMAS``, by default that whose keys a row has.
        train_on: "all" turns of the assistant, the "last" one, or "everything".
        on_bad: What to do about a row that is none: ``stop`` with its place, ``skip`` and count
            it, or ``report`` it in ``PREFIX.bad.jsonl`` too.
        workers: Processes, by default one a core; 0 is this one.
        variables: Of the template, such as ``{"enable_thinking": False}``.
        date: For templates that write one: anything with ``strftime``.
        max_bytes: A longer line is bad.
        overwrite: Replace what stands under ``prefix``.

    Raises:
        BadText: A ``ValueError``: with ``on_bad="stop"``, the first bad row.
        ValueError: An argument is wrong, or an input changed.
        FileExistsError: A dataset stands under ``prefix``.
        OSError: An input cannot be read, or there is no room.
    """
    if schema != AUTO and schema not in SCHEMAS:
        raise ValueError(f"schema={schema!r} must be one of {', '.join((AUTO, *SCHEMAS))}")
    if train_on not in TRAIN_ON:
        raise ValueError(f"train_on={train_on!r} must be one of {', '.join(TRAIN_ON)}")
    settings = _settings(CONVERSATIONS, tokenizer, template, variables, date, max_bytes)
    settings = settings._replace(schema=schema, train_on=train_on)
    return _prepare(inputs, prefix, settings, on_bad, workers, overwrite)


def prepare_preferences(
    inputs: Iterable[str | os.PathLike[str]],
    prefix: str | os.PathLike[str],
    *,
    tokenizer: str,
    template: str | Path | None = None,
    on_bad: str = STOP,
    workers: int | None = None,
    variables: Mapping[str, Any] | None = None,
    date: Any = None,
    max_bytes: int = MAX_BYTES,
    overwrite: bool = False,
) -> InstructionReport:
    """Write pairs of answers: document ``2 i`` is the chosen of pair ``i``, ``2 i + 1`` the other.

    A row has ``chosen``, ``rejected`` and, unless both begin with the same messages, ``prompt``:
    lists of messages, or strings. Both answers follow the whole prompt; what is learnt is the
    assistant's turns after it. The arguments and the rest are those of ``prepare_conversations``.
    """
    settings = _settings(PREFERENCES, tokenizer, template, variables, date, max_bytes)
    return _prepare(inputs, prefix, settings, on_bad, workers, overwrite)


def _settings(
    kind: str,
    tokenizer: str,
    template: str | Path | None,
    variables: Mapping[str, Any] | None,
    date: Any,
    max_bytes: int,
) -> Settings:
    max_bytes = whole_number("max_bytes", max_bytes, 1, 1 << 30)
    plain = open_encoder(tokenizer)
    source, given = open_template(template, tokenizer, variables=variables)
    if source is None and kind == PREFERENCES:
        raise ValueError(f"template=None needs a tokenizer that has one, not {tokenizer!r}")
    if source is not None:
        ChatTemplate(source, variables=given, date=date)  # is refused here, not by a worker
    dtype = smallest_dtype(plain.vocab_size).name
    return Settings(
        kind,
        tokenizer,
        plain.name,
        dtype,
        AUTO,
        source,
        given,
        date,
        ALL,
        plain.end,
        max_bytes,
    )


def _prepare(
    inputs: Iterable[str | os.PathLike[str]],
    prefix: str | os.PathLike[str],
    settings: Settings,
    on_bad: str,
    workers: int | None,
    overwrite: bool,
) -> InstructionReport:
    prefix = prefix_of(prefix)
    if on_bad not in POLICIES:
        raise ValueError(f"on_bad={on_bad!r} must be one of {', '.join(POLICIES)}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = whole_number("workers", (cores or 1) if workers is None else workers, 0, 1024)
    files = find_inputs(inputs)
    refuse_other_formats(files)
    total = _Totals()
    with (
        tempfile.TemporaryFile() as places,
        IndexedDatasetBuilder(
            prefix,
            settings.dtype,
            overwrite=overwrite,
            multimodal=True,
            tokenizer=settings.name,
        ) as builder,
        closing(_encoded(files, settings, workers)) as answers,
    ):
        for block, encoded in answers:
            _note_bad(block, encoded, on_bad, places)
            _add(builder, encoded)
            total.add(encoded)
        hashes = [_hash_of(file.path) for file in files]
        refuse_changed(files)
        builder.finish()
        report = total.report(settings.dtype)
        if on_bad == REPORT:
            places.seek(0)
            replace_file(Path(prefix + BAD), places.read())
        else:
            Path(prefix + BAD).unlink(missing_ok=True)
    source = _source(prefix, files, hashes, settings, report)
    replace_file(Path(prefix + SOURCE), json.dumps(source, indent=1).encode() + b"\n")
    return report


def _encoded(
    files: list[Input], settings: Settings, workers: int
) -> Generator[tuple[Block, EncodedRows], None, None]:
    """Each block with what is written of it, in their order."""
    pool: Workers = Pool(settings, workers) if workers else OwnProcess(settings)
    progress = Progress("prepare", sum(file.size for file in files))
    try:
        limits = {"block_bytes": BLOCK_BYTES, "max_bytes": settings.max_bytes}
        for block, encoded in pool.encode(blocks(files, **limits)):
            yield block, encoded
            progress.add(block.nbytes)
    finally:
        progress.close()
        pool.close()


def _note_bad(block: Block, encoded: EncodedRows, on_bad: str, places: IO[bytes]) -> None:
    if encoded.bad and on_bad == STOP:
        first = encoded.bad[0]
        line = f" line {first.line}" if first.line else ""
        raise BadText(
            f"{block.path}:{line} {first.reason} (on_bad='skip' or 'report' goes on without it)"
        )
    for one in encoded.bad:
        row = {"file": block.path, "line": one.line or None, "reason": one.reason}
        places.write(json.dumps(row).encode() + b"\n")


def _add(builder: IndexedDatasetBuilder, encoded: EncodedRows) -> None:
    start = sequence = 0
    for count in encoded.counts:
        lengths = encoded.sequences[sequence : sequence + count]
        stop = start + sum(lengths)
        modes = encoded.modes[sequence : sequence + count]
        builder.add_document(encoded.ids[start:stop], lengths, modes)
        start, sequence = stop, sequence + count


class _Totals:
    """The counts of all blocks."""

    def __init__(self) -> None:
        self._counts, self._schemas, self._bad = Counter(), Counter(), Counter()
        self._longest = 0

    def add(self, encoded: EncodedRows) -> None:
        """Count one more block."""
        self._schemas.update(encoded.schemas)
        self._bad.update(one.reason.partition(": ")[0] for one in encoded.bad)
        self._counts.update(
            documents=len(encoded.counts),
            tokens=len(encoded.ids),
            learnt=encoded.learnt,
            empty=encoded.empty,
            control=encoded.control,
        )
        if encoded.counts:
            firsts = np.cumsum([0, *encoded.counts[:-1]])
            self._longest = max(
                self._longest, int(np.add.reduceat(encoded.sequences, firsts).max())
            )

    def report(self, dtype: str) -> InstructionReport:
        """What was written."""
        names = ("documents", "tokens", "learnt", "empty", "control")
        return InstructionReport(
            **{name: self._counts[name] for name in names},
            longest=self._longest,
            dtype=dtype,
            schemas=dict(sorted(self._schemas.items())),
            bad=dict(sorted(self._bad.items())),
        )


def _source(
    prefix: str,
    files: list[Input],
    hashes: list[str],
    settings: Settings,
    report: InstructionReport,
) -> dict[str, Any]:
    """What stands in ``PREFIX.source.json``."""
    manifest = IndexedDataset(prefix).manifest
    template = (settings.template or "").encode()
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "megablocks_core": __version__,
        "build": manifest.build if manifest else None,
        "kind": settings.kind,
        "tokenizer": settings.name,
        "tokenizer_spec": settings.tokenizer,
        "schema": settings.schema,
        "train_on": settings.train_on,
        "template": settings.template,
        "template_xxh3_128": xxhash.xxh3_128_hexdigest(template),
        "variables": {name: repr(value) for name, value in settings.variables.items()},
        **asdict(report),
        "inputs": [
            {"path": file.path, "size": file.size, "modified_ns": file.changed, "xxh3_128": found}
            for file, found in zip(files, hashes, strict=True)
        ],
    }


def _hash_of(path: str) -> str:
    whole = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while part := file.read(_HASHED):
            whole.update(part)
    return whole.hexdigest()
