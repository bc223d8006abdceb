"""Folders of Hugging Face ``datasets``, as ``save_to_disk`` writes and ``load_from_disk`` reads.

``state.json`` names the files, each a stream of Arrow, which pyarrow alone reads and writes.

Source: https://github.com/huggingface/datasets (``arrow_dataset.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megablocks_core.data.convert.documents import BadSource, Batch, Counts
from megablocks_core.data.convert.texts import Texts
from megablocks_core.data.packages import package
from megablocks_core.files import create_file, read_json, sync_file

SHARD_BYTES = 500_000_000
COLUMN = "input_ids"
_COLUMNS = (COLUMN, "tokens", "text")
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream that was closed


class HFFolder:
    """The rows of a folder's files, in order.

    Args:
        folder: With a ``state.json``.
        column: Of ids or of texts; by default the first there is of ``input_ids``, ``tokens``
            and ``text``.

    Attributes:
        dtype: Of the ids; ``None`` where the column holds texts.

    Raises:
        ValueError: It is no such folder, a file is missing or cut short, or has no such column.
    """

    tokenizer: str | None = None

    def __init__(self, folder: Path, column: str | None) -> None:
        self._arrow = _pyarrow()
        if (splits := folder / "dataset_dict.json").is_file():
            names = read_json(splits, dict).get("splits")
            raise ValueError(f"{folder}: holds the splits {names}; name the folder of one")
        state = read_json(folder / "state.json", dict)
        if state.get("_indices_data_files"):
            raise ValueError(
                f"{folder}: has rows chosen by a file; save it anew with flatten_indices"
            )
        self._paths = [folder / name for name in _file_names(state, folder / "state.json")]
        self.nbytes = sum(_whole_size(path) for path in self._paths)
        self._column, kind = "", None
        for path in self._paths:
            with self._open(path) as reader:
                self._column = _column_of(reader.schema.names, column or self._column, path)
                found = reader.schema.field(self._column).type
            if kind is not None and found != kind:
                raise BadSource(f"{path}: its column {self._column!r} is {found}, must be {kind}")
            kind = found
        self.dtype = self._dtype_of(kind)

    def batches(self, counts: Counts) -> Iterator[Batch]:
        """The documents of a column of ids; a row is one."""
        for path, column, nbytes in self._columns():
            ids = column.flatten()
            if column.null_count or ids.null_count:
                raise BadSource(f"{path}: column {self._column!r} has a null, must be ids")
            if self._arrow.types.is_fixed_size_list(column.type):
                lengths = np.full(len(column), column.type.list_size, np.int64)
            else:
                lengths = np.asarray(column.value_lengths()).astype(np.int64)
            yield Batch(np.asarray(ids), lengths, nbytes)

    def texts(self) -> Iterator[Texts]:
        """The texts of a column of texts."""
        for path, column, nbytes in self._columns():
            if column.null_count:
                raise BadSource(f"{path}: column {self._column!r} has a null, must be texts")
            try:
                yield Texts(column.to_pylist(), nbytes)
            except UnicodeDecodeError as error:
                raise BadSource(f"{path}: column {self._column!r} is not UTF-8: {error}") from None

    def _columns(self) -> Iterator[tuple[Path, Any, int]]:
        """The column's pieces, and the bytes of each."""
        for path in self._paths:
            try:
                with self._open(path) as reader:
                    for batch in reader:
                        batch.validate()
                        if len(batch):
                            yield path, batch.column(self._column), batch.nbytes
            except (self._arrow.ArrowException, EOFError) as error:
                raise BadSource(
                    f"{path}: is no stream of Arrow that can be read: {error}"
                ) from None

    def _open(self, path: Path) -> Any:
        try:
            return self._arrow.ipc.open_stream(self._arrow.memory_map(os.fspath(path)))
        except self._arrow.ArrowException as error:
            raise BadSource(f"{path}: is no stream of Arrow that can be read: {error}") from None

    def _dtype_of(self, kind: Any) -> np.dtype | None:
        types = self._arrow.types
        if types.is_string(kind) or types.is_large_string(kind):
            return None
        lists = ("is_list", "is_large_list", "is_fixed_size_list")
        if any(getattr(types, one)(kind) for one in lists) and types.is_integer(kind.value_type):
            return np.dtype(kind.value_type.to_pandas_dtype())
        raise ValueError(
            f"{self._paths[0]}: column {self._column!r} is {kind}, must be lists of whole numbers, "
            f"or texts"
        )


def write_hf(folder: Path, batches: Iterator[Batch], dtype: np.dtype, shard_bytes: int) -> int:
    """Write a folder of files of about so many bytes each; returns how many there are."""
    arrow = _pyarrow()
    values = arrow.from_numpy_dtype(dtype)
    item = {"feature": {"dtype": dtype.name, "_type": "Value"}, "_type": "List"}
    features = {COLUMN: item}
    head = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = arrow.schema([arrow.field(COLUMN, arrow.list_(values))], metadata=head)
    content, sizes = xxhash.xxh3_64(), []
    runs = (run for batch in batches for run in batch.runs())
    run = next(runs, None)
    while run is not None or not sizes:
        path = folder / f"{len(sizes):05}.arrow"
        sizes.append(0)
        with open(path, "xb") as file:
            with arrow.ipc.new_stream(file, schema) as writer:
                while run is not None and sizes[-1] < shard_bytes:
                    ends = np.cumsum(run.lengths)
                    if len(ends) and ends[-1] >= 1 << 31:
                        raise ValueError(f"a document of {ends[-1]} tokens must have below 2**31")
                    offsets = np.concatenate(([0], ends)).astype(np.int32)
                    rows = arrow.ListArray.from_arrays(
                        arrow.array(offsets), arrow.array(run.tokens, type=values)
                    )
                    writer.write_batch(arrow.record_batch([rows], schema=schema))
                    content.update(np.ascontiguousarray(run.tokens).data)
                    content.update(offsets.data)
                    sizes[-1] += run.tokens.nbytes + offsets.nbytes
                    run = next(runs, None)
            sync_file(file)
    _name_files(folder, len(sizes), features, content.hexdigest())
    return len(sizes)


def _name_files(folder: Path, number: int, features: dict[str, Any], fingerprint: str) -> None:
    names = [f"data-{index:05}-of-{number:05}.arrow" for index in range(number)]
    for index, name in enumerate(names):
        os.rename(folder / f"{index:05}.arrow", folder / name)
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    create_file(folder / "dataset_info.json", json.dumps(info, indent=2).encode())
    create_file(folder / "state.json", json.dumps(state, indent=2).encode())


def _file_names(state: dict[str, Any], path: Path) -> list[str]:
    try:
        names = [one["filename"] for one in state["_data_files"]]
        if not names or not all(os.path.basename(name) == name for name in names):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise BadSource(f"{path}: its _data_files must name files beside it") from None
    return names


def _whole_size(path: Path) -> int:
    """The size of a stream; one that was cut between two batches would seem to end there."""
    if not path.is_file():
        raise BadSource(f"{path} is missing")
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - len(_END)))
        if file.read() != _END:
            raise BadSource(f"{path}: is cut short, or no stream of Arrow")
    return size


def _column_of(names: Sequence[str], column: str | None, path: Path) -> str:
    wanted = [column] if column else _COLUMNS
    for name in wanted:
        if name in names:
            return name
    raise ValueError(f"{path}: has the columns {list(names)}, must have {' or '.join(wanted)}")


def _pyarrow() -> Any:
    arrow = package("pyarrow", what="a folder of Hugging Face datasets")
    package("pyarrow.ipc", what="a folder of Hugging Face datasets")
    return arrow
