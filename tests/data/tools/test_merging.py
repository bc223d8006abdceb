"""A merged dataset is its parts one after the other, whole or not there."""

import os
import resource
import signal

import numpy as np
import pytest

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder
from megablocks_core.data.publish import HashedFile, Staging
from megablocks_core.data.tools import DamagedDataset, inspect, merge, verify

from .conftest import build, contents, in_a_child, names


def test_f_109_parts_keep_their_document_borders(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32) as builder:
        builder.add_document([1])
        builder.add_document([2, 3], lengths=[1, 1])
    with IndexedDatasetBuilder(tmp_path / "b", dtype=np.int32) as builder:
        builder.add_document([4, 5], lengths=[1, 1])
    merged = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", command_line=["me"])
    dataset = IndexedDataset(tmp_path / "out")
    assert dataset.document_indices.tolist() == [0, 1, 3, 5]
    assert contents(tmp_path / "out") == [[1], [2, 3], [4, 5]]
    assert (merged.parts, merged.documents, merged.tokens) == (2, 3, 5)
    assert (merged.dtype, merged.widened) == ("int32", False)
    source = inspect(tmp_path / "out").source
    assert source["command_line"] == ["me"] and len(source["parts"]) == 2


@pytest.mark.parametrize(
    ("one", "other", "dtype"),
    [
        ("uint16", "int32", "int32"),
        ("uint8", "int8", "int16"),
        ("int16", "uint16", "int32"),
        ("uint16", "uint8", "uint16"),
        ("int64", "uint8", "int64"),
        ("float32", "float64", "float64"),
    ],
)
def test_f_110_parts_of_two_dtypes_are_widened(tmp_path, one, other, dtype):
    parts = []
    for number, kind in enumerate((one, other)):
        limits = np.iinfo(kind) if np.dtype(kind).kind != "f" else np.finfo(kind)
        documents = [np.array([limits.min, limits.max], kind), np.array([1], kind)]
        parts.append(build(tmp_path / f"{number}", documents, kind))
    merged = merge(parts, tmp_path / "out")
    assert (merged.dtype, merged.widened) == (dtype, True)
    assert contents(tmp_path / "out") == contents(parts[0]) + contents(parts[1])
    assert verify(tmp_path / "out").faults == []


def test_integers_and_floats_do_not_mix(tmp_path):
    parts = [build(tmp_path / "a", [[1]]), build(tmp_path / "b", [[0.5]], np.float64)]
    with pytest.raises(ValueError, match="must all hold integers, or all floats"):
        merge(parts, tmp_path / "out")


def test_modes_and_tokenizers(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.uint8, multimodal=True) as builder:
        builder.add_document([1], modes=[3])
    build(tmp_path / "b", [[2]], np.uint8, tokenizer="one")
    merge([tmp_path / "b", tmp_path / "a"], tmp_path / "out")
    dataset = IndexedDataset(tmp_path / "out")
    assert dataset.sequence_modes.tolist() == [0, 3] and dataset.manifest.tokenizer == "one"
    build(tmp_path / "c", [[2]], np.uint8, tokenizer="two")
    with pytest.raises(ValueError, match="its tokenizer 'two' must be 'one'"):
        merge([tmp_path / "b", tmp_path / "c"], tmp_path / "no")
    assert not [name for name in names(tmp_path) if name.startswith("no")]


def test_an_input_is_not_the_output_and_what_stands_there_stays(tmp_path):
    parts = [build(tmp_path / "a", [[1]]), build(tmp_path / "b", [[2]])]
    with pytest.raises(ValueError, match="must not be an input"):
        merge(parts, tmp_path / "b", overwrite=True)
    build(tmp_path / "c", [[3]])
    with pytest.raises(FileExistsError):
        merge(parts, tmp_path / "c")
    assert contents(tmp_path / "b") == [[2]] and contents(tmp_path / "c") == [[3]]
    merge(parts, tmp_path / "c", overwrite=True)
    assert contents(tmp_path / "c") == [[1], [2]]
    with pytest.raises(ValueError, match="must name at least one"):
        merge([], tmp_path / "d")


def test_a_damaged_part_is_named_and_nothing_is_written(tmp_path):
    parts = [build(tmp_path / "a", [[1]]), build(tmp_path / "b", [[2, 3]])]
    (tmp_path / "b.bin").write_bytes(b"\x00" * 4)
    with pytest.raises(DamagedDataset, match="b.bin: holds 4 bytes of xxh3"):
        merge(parts, tmp_path / "out")
    assert not [name for name in names(tmp_path) if name.startswith("out")]


@pytest.mark.parametrize("at", range(1, 9))
def test_a_kill_at_any_write_leaves_nothing_that_looks_complete(tmp_path, monkeypatch, at):
    parts = [build(tmp_path / "a", [[1], [2]]), build(tmp_path / "b", [[3]])]
    calls, real, publish = [], HashedFile.write, Staging.publish

    def counted(self, *arguments, **options):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return (real if isinstance(self, HashedFile) else publish)(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(HashedFile, "write", counted)
        patch.setattr(Staging, "publish", counted)
        assert in_a_child(lambda: merge(parts, tmp_path / "out")) == -signal.SIGKILL
    for ending in (".bin", ".idx", ".manifest.json"):
        assert not (tmp_path / f"out{ending}").exists()
    merge(parts, tmp_path / "out")
    assert contents(tmp_path / "out") == [[1], [2], [3]]
    assert not [name for name in names(tmp_path) if ".tmp" in name]


@pytest.mark.parametrize("size", [100, 4000, 10_100])
def test_a_disk_that_fills_leaves_nothing(tmp_path, size):
    """Files may grow to ``size`` bytes: less than the tokens, or than the index."""
    parts = [build(tmp_path / name, [[1]] * 1000 + [[2] * 1000]) for name in "ab"]
    before = names(tmp_path)

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        with pytest.raises(OSError, match="too large"):
            merge(parts, tmp_path / "out")

    assert in_a_child(work) == 0
    assert names(tmp_path) == before
