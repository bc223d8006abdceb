"""Records come back whole, equal hashes in one part, in order, and leave nothing behind."""

import os
import resource
import signal

import numpy as np
import pytest
import xxhash

from megablocks_core.data import IndexedDataset
from megablocks_core.data.tools import hash_records
from megablocks_core.data.tools.hash_records import LEAST_MEMORY, HashRecords

from .conftest import build, in_a_child, names


@pytest.fixture
def datasets(tmp_path):
    draw = np.random.default_rng(0)
    lists = [
        [draw.integers(0, 5, n).tolist() for n in draw.integers(0, 4, k)] for k in (300, 0, 90)
    ]
    dtypes = (np.uint16, np.int32, np.int64)
    prefixes = [
        build(tmp_path / f"{number}", documents, dtype)
        for number, (documents, dtype) in enumerate(zip(lists, dtypes, strict=True))
    ]
    return [IndexedDataset(prefix) for prefix in prefixes], lists


def plain(lists):
    """Each document's hash and place, without empty ones."""
    documents = [document for documents in lists for document in documents]
    return {
        (xxhash.xxh3_128_digest(np.array(document, "<i8")), place)
        for place, document in enumerate(documents)
        if document
    }


@pytest.mark.parametrize(("files", "working", "piece"), [(256, 1, 9), (4, 4000, 2), (3, 90000, 1)])
def test_all_records_once_and_equal_hashes_in_one_part(
    tmp_path, datasets, monkeypatch, files, working, piece
):
    """With few files and much work a record, parts are read in several passes and chunks."""
    monkeypatch.setattr(hash_records, "FILES", files)
    monkeypatch.setattr(hash_records, "WORKING", working)
    opened, lists = datasets
    monkeypatch.setattr(hash_records, "pieces", lambda a, b, *, tokens: by_one(a, b))
    records = HashRecords(opened, memory=LEAST_MEMORY, folder=tmp_path)
    assert records.starts.tolist() == [0, 300, 300, 390]
    assert records.empty == [documents.count([]) for documents in lists]
    found, seen = set(), set()
    for part in records.parts():
        rows = np.concatenate(list(part)) if working < 90000 else np.concatenate([*part])
        keys = rows[["high", "low"]].tobytes()
        hashes = {keys[at : at + 16] for at in range(0, len(keys), 16)}
        assert not hashes & seen
        seen |= hashes
        assert (np.diff(rows["place"].astype(np.int64)) > 0).all()
        for row in rows:
            found.add((row[["high", "low"]].tobytes()[:16], int(row["place"])))
    records.close()
    assert found == plain(lists)


def by_one(start, stop):
    return ((at, at + 1) for at in range(start, stop))


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_long_documents_are_hashed_in_pieces(datasets, monkeypatch, tokens):
    opened, lists = datasets
    records = HashRecords(opened, memory=LEAST_MEMORY)
    records._tokens = tokens
    bounds = np.cumsum([0, *map(len, lists[0])])
    found = records._hash(opened[0], bounds)
    for row, document in zip(found, lists[0], strict=True):
        assert row.tobytes() == xxhash.xxh3_128_digest(np.array(document, "<i8"))
    records.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_kill_leaves_no_file(tmp_path, datasets, monkeypatch, number):
    opened, _ = datasets
    (folder := tmp_path / "aside").mkdir()
    real, sizes = HashRecords._write, tmp_path / "sizes"

    def write(self, records):
        real(self, records)
        if len(self._files) and records["place"][0] >= 300:
            sizes.write_text(str(sum(os.fstat(file.fileno()).st_size for file in self._files)))
            os.kill(os.getpid(), number)

    monkeypatch.setattr(HashRecords, "_write", write)
    status = in_a_child(lambda: HashRecords(opened, memory=LEAST_MEMORY, folder=folder))
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    assert int(sizes.read_text()) > 24 * 200  # it had written much
    assert names(folder) == []


def test_a_folder_that_is_not_there(tmp_path, datasets):
    with pytest.raises(FileNotFoundError):
        HashRecords(datasets[0], memory=LEAST_MEMORY, folder=tmp_path / "none")


def test_a_disk_that_fills_is_an_error(tmp_path, datasets):
    (folder := tmp_path / "aside").mkdir()

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(OSError, match="too large"):
            HashRecords(datasets[0], memory=LEAST_MEMORY, folder=folder)

    assert in_a_child(work) == 0
    assert names(folder) == []
