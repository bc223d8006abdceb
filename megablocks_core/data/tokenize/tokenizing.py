"""Texts to an indexed dataset, by several processes, which goes on where it was killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megablocks_core.data.builder import smallest_dtype
from megablocks_core.data.checks import prefix_of, whole_number
from megablocks_core.data.publish import Staging
from megablocks_core.data.tokenize.encoders import end_of_document, open_encoder
from megablocks_core.data.tokenize.encoding import Encoded, Settings
from megablocks_core.data.tokenize.fast_engine import AUTO, GIGATOKEN, HF, choose_engine
from megablocks_core.data.tokenize.inputs import Input, find_inputs, refuse_changed
from megablocks_core.data.tokenize.pool import OwnProcess, Pool, Workers
from megablocks_core.data.tokenize.publication import conclude, is_published, publish
from megablocks_core.data.tokenize.reading import BadText, UnitReader
from megablocks_core.data.tokenize.staged import Counts, Staged
from megablocks_core.data.tokenize.threads import Threads
from megablocks_core.data.tokenize.units import Unit, plan
from megablocks_core.files.progress import Progress

STOP, SKIP, REPORT = "stop", "skip", "report"
POLICIES = (STOP, SKIP, REPORT)
UNIT_BYTES = 1 << 22
MAX_BYTES = 1 << 25
COMMIT_SECONDS = 2.0
THREADS = 4  # workers up to which the fast engine's are threads
_SAMPLE = 1 << 16  # characters of the input on which engines must agree


@dataclass(frozen=True)
class TokenizeReport:
    """What was written.

    Attributes:
        documents: How many.
        tokens: Of them.
        dtype: That they are stored in.
        empty: Texts without tokens, which gave no document.
        bad: How many lines, rows and files are no text, by reason.
        inner_ends: How often a text itself held the end of document.
        text_bytes: Of the documents' texts, in UTF-8.
        engine: That encoded them.
        resumed: Units of work that an earlier call had done.
    """

    documents: int
    tokens: int
    dtype: str
    empty: int
    bad: dict[str, int]
    inner_ends: int
    text_bytes: int
    engine: str
    resumed: int


def tokenize(
    inputs: Iterable[str | os.PathLike[str]],
    prefix: str | os.PathLike[str],
    *,
    tokenizer: str,
    engine: str = AUTO,
    workers: int | None = None,
    append_eod: bool | int | str = False,
    key: str = "text",
    on_bad: str = STOP,
    max_bytes: int = MAX_BYTES,
    suffixes: Sequence[str] = (),
    overwrite: bool = False,
    command_line: Sequence[str] = (),
) -> TokenizeReport:
    """Write the texts of files and folders as ``prefix.bin`` and ``prefix.idx``, each a document.

    A ``.jsonl`` or ``.ndjson`` file has a text in the ``key`` of each line (other keys are
    ignored, blank lines left out), a ``.parquet`` file in its column ``key``; any other file is
    one text. All but Parquet may end in ``.gz`` or ``.zst``. A folder's files come sorted by
    path. A text without tokens gives no document, and is counted.

    The files are the same, byte for byte, for any ``workers``, engine and number of kills. A
    call that was killed, or found no room, leaves ``PREFIX.tokenizing/``; the same call then goes
    on after what was synced there, at most about two seconds and the units under way before.
    Nothing has the name of a dataset before all of it is written.

    Args:
        inputs: Paths.
        prefix: Of the dataset.
        tokenizer: ``bytes``, ``hf:PATH``, ``tiktoken:NAME`` or ``sp:PATH``.
        engine: ``auto``, ``hf`` or ``gigatoken``: the last is used if its ids are the same.
        workers: By default one a core: processes, or up to four with gigatoken threads; 0 is this
            thread.
        append_eod: End each document with the tokenizer's own end, or with this token or id.
        key: Of the text.
        on_bad: What to do about a line, row or file that is no text: ``stop`` the run with its
            place, ``skip`` and count it, or ``report`` it in ``PREFIX.bad.jsonl`` too.
        max_bytes: A longer line or text is bad; memory is a small multiple a worker.
        suffixes: Of a folder, take names that end so.
        overwrite: Replace what stands under ``prefix``.
        command_line: Recorded in ``PREFIX.source.json``.

    Raises:
        BadText: A ``ValueError``: with ``on_bad="stop"``, the first bad line.
        ValueError: An argument is wrong, an input changed, or another call began the folder.
        FileExistsError: A dataset stands under ``prefix``.
        OSError: An input cannot be read, or there is no room.
    """
    prefix = prefix_of(prefix)
    if on_bad not in POLICIES:
        raise ValueError(f"on_bad={on_bad!r} must be one of {', '.join(POLICIES)}")
    max_bytes = whole_number("max_bytes", max_bytes, 1, 1 << 30)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = whole_number("workers", (cores or 1) if workers is None else workers, 0, 1024)
    files = find_inputs(inputs, suffixes)
    may_thread = engine != HF and tokenizer.startswith("hf:") and workers <= THREADS
    pool = Pool(None, workers) if workers and not may_thread else None  # it starts meanwhile
    try:
        plain = open_encoder(tokenizer)
        end = end_of_document(plain, append_eod)
        dtype = smallest_dtype(plain.vocab_size).name
        sample = [] if engine == HF else _sample(files, key, max_bytes)
        engine, _ = choose_engine(tokenizer, engine, plain, sample)
        settings = Settings(
            tokenizer, plain.name, engine, end, dtype, key, max_bytes, plain.vocab_size
        )
        staged = _open_staged(prefix, files, settings, overwrite)
        try:
            resumed = staged.counts.units
            if on_bad == STOP and staged.counts.bad:
                raise BadText(
                    f"{staged.folder}: {sum(staged.counts.bad.values())} bad lines were skipped "
                    f"already; give on_bad='skip' or 'report' as before, or remove the folder"
                )
            if is_published(staged, prefix):
                Staging(prefix, overwrite=True).discard()  # finishes what a kill cut short
            else:
                _write_all(staged, files, settings, pool or workers, on_bad)
                refuse_changed(files)
                publish(staged, prefix, overwrite=overwrite)
            conclude(staged, prefix, command_line=command_line, list_bad=on_bad == REPORT)
        finally:
            staged.close()
    finally:
        if pool is not None:
            pool.close()
    return _report(staged.counts, settings, resumed)


def _open_staged(prefix: str, files: list[Input], settings: Settings, overwrite: bool) -> Staged:
    recipe: dict[str, Any] = {
        "tokenizer": settings.name,
        "tokenizer_spec": settings.tokenizer,
        "engine": settings.engine,
        "end": settings.end,
        "dtype": settings.dtype,
        "key": settings.key,
        "max_bytes": settings.max_bytes,
        "unit_bytes": UNIT_BYTES,
        "inputs": files,
    }
    began = os.path.isdir(f"{prefix}.tokenizing")
    if not began:
        Staging(prefix, overwrite=overwrite).discard()  # refuses now, not after hours
    staged = Staged(prefix, recipe)
    try:
        if began and not is_published(staged, prefix):
            Staging(prefix, overwrite=overwrite).discard()
    except BaseException:
        staged.close()
        raise
    return staged


def _write_all(
    staged: Staged, files: list[Input], settings: Settings, pool: Pool | int, on_bad: str
) -> None:
    """Encode and write all units that are not written yet."""
    rules = {"key": settings.key, "max_bytes": settings.max_bytes}
    units = plan(files, unit_bytes=UNIT_BYTES, done=staged.counts.units, **rules)
    workers = _open_workers(settings, pool)
    left = sum(file.size for file in files) - staged.counts.nbytes
    progress = Progress("tokenize", left)
    try:
        _write_units(staged, files, workers.encode(units), on_bad, progress)
    finally:
        progress.close()
        workers.close()


def _open_workers(settings: Settings, pool: Pool | int) -> Workers:
    """The processes that were started, or so many workers of the kind that suits."""
    if isinstance(pool, Pool):
        pool.begin(settings)
        return pool
    if not pool:
        return OwnProcess(settings)
    if settings.engine == GIGATOKEN and pool <= THREADS:
        return Threads(settings._replace(threads=True), pool)
    return Pool(settings, pool)


def _write_units(
    staged: Staged,
    files: list[Input],
    encoded_units: Iterator[tuple[Unit, Encoded]],
    on_bad: str,
    progress: Progress,
) -> None:
    synced = time.monotonic()
    for unit, encoded in encoded_units:
        before = staged.lines_before(unit)
        bad = [
            (files[one.file].path, one._replace(line=one.line + before if one.line else 0))
            for one in encoded.bad
        ]
        if bad and on_bad == STOP:
            staged.commit()
            path, first = bad[0]
            line = f" line {first.line}" if first.line else ""
            raise BadText(
                f"{path}:{line} {first.reason} (on_bad='skip' or 'report' goes on without it)"
            )
        staged.append(unit, encoded, bad)
        progress.add(unit.nbytes)
        if time.monotonic() - synced > COMMIT_SECONDS:
            staged.commit()
            synced = time.monotonic()
    staged.commit()


def _sample(files: list[Input], key: str, max_bytes: int) -> list[str]:
    """The first texts of the input, a small part of them."""
    units = plan(files, key=key, unit_bytes=_SAMPLE, max_bytes=max_bytes)
    unit = next(units, None)
    texts = UnitReader(key, max_bytes).read(unit).texts if unit is not None else []
    return [text[:_SAMPLE] for text in texts]


def _report(counts: Counts, settings: Settings, resumed: int) -> TokenizeReport:
    return TokenizeReport(
        documents=counts.documents,
        tokens=counts.tokens,
        dtype=settings.dtype,
        empty=counts.empty,
        bad=dict(sorted(counts.bad.items())),
        inner_ends=counts.inner_ends,
        text_bytes=counts.text_bytes,
        engine=settings.engine,
        resumed=resumed,
    )
