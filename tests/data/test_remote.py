"""A dataset behind a URL is the dataset: the same values, few requests, and no short read."""

import os
import pickle
import shutil
import signal
import sys
import threading

import fsspec
import numpy as np
import pytest

from megablocks_core.data import GPTDataset, IndexedDataset, IndexedDatasetBuilder, remote


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks of 64 bytes, and no waiting."""
    monkeypatch.setattr(remote, "BLOCK_BYTES", 64)
    monkeypatch.setattr(remote, "FIRST_WAIT", 0)


@pytest.fixture
def prefix(tmp_path):
    lengths = [3, 0, 40, 1, 200, 7] * 5
    ends = np.cumsum([0, *lengths])
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.uint16, multimodal=True) as builder:
        for start, length in zip(ends[:-1], lengths, strict=True):
            builder.add_document(np.arange(start, start + length), modes=[length % 3])
    return tmp_path / "a"


@pytest.fixture
def url(prefix):
    """The same files in memory."""
    memory = fsspec.filesystem("memory")
    for path in prefix.parent.iterdir():
        memory.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    yield "memory://bucket/a"
    memory.rm("/bucket", recursive=True)


def files_of(dataset):
    return dataset._token_file.files


def requests_of(monkeypatch, dataset, answer=None):
    """The list of (path, start, end) that are asked for from now on."""
    system, asked = files_of(dataset)._system, []
    real = type(system).cat_file

    def cat_file(path, start=None, end=None):
        asked.append((path, start, end))
        data = real(system, path, start=start, end=end)
        return answer(data) if answer else data

    monkeypatch.setattr(system, "cat_file", cat_file)
    return asked


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_reads_what_the_mapped_files_hold(prefix, url, scheme):
    local = IndexedDataset(prefix)
    far = IndexedDataset(url if scheme == "memory" else f"file://{prefix}")
    assert (len(far), far.num_documents, far.num_tokens) == (30, 30, local.num_tokens)
    assert far.dtype == local.dtype
    for name in ("sequence_lengths", "sequence_pointers", "document_indices", "sequence_modes"):
        ours, theirs = getattr(local, name), getattr(far, name)
        assert np.asarray(theirs).dtype == ours.dtype
        assert np.array_equal(np.asarray(theirs), ours)
    assert np.array_equal(np.asarray(far.tokens), local.tokens)
    for a, b in zip(local, far, strict=True):
        assert np.array_equal(a, b)
    assert far.get(4, 10, 100).tolist() == local.get(4, 10, 100).tolist()
    assert [x.tolist() for x in far[3:9:2]] == [x.tolist() for x in local[3:9:2]]
    assert far.fingerprint == local.fingerprint
    assert far.manifest == local.manifest
    assert far.content_hashes().tolist() == local.content_hashes().tolist()
    far.verify()


def test_elements_slices_and_chosen_elements_are_those_of_an_array(prefix, url):
    local, far = IndexedDataset(prefix).tokens, IndexedDataset(url).tokens
    for index in (0, -1, np.int64(7), slice(5, 90), slice(90, 5), slice(None, None, -3), slice(9)):
        assert np.array_equal(far[index], local[index])
    places = np.array([5, 900, 5, -1, 64, 31])
    assert np.array_equal(far[places], local[places])
    assert far[places[:0]].shape == (0,)
    assert (far.ndim, far.size, far.shape) == (1, local.size, local.shape)
    assert far.nbytes == local.nbytes
    assert np.asarray(far, np.int64).dtype == np.int64
    for outside in (local.size, -local.size - 1):
        with pytest.raises(IndexError, match="of 1255"):
            far[outside]


def test_batches_are_those_of_the_mapped_files(prefix, url):
    batches = [
        GPTDataset(IndexedDataset(name), 50, seed=1).batch(range(10)) for name in (prefix, url)
    ]
    for name, values in batches[0].items():
        assert np.array_equal(batches[1][name], values)


def test_merges_from_far_away(tmp_path, prefix, url):
    with IndexedDatasetBuilder(tmp_path / "b", dtype=np.uint16, multimodal=True) as builder:
        builder.add_index(url)
    for ending in (".bin", ".idx", ".hashes"):
        assert (tmp_path / f"b{ending}").read_bytes() == (tmp_path / f"a{ending}").read_bytes()


def test_asks_for_ranges_and_for_no_block_twice(monkeypatch, url):
    dataset = IndexedDataset(url)
    asked = requests_of(monkeypatch, dataset)
    assert dataset[2].tolist() == list(range(3, 43))
    blocks = len(asked)
    assert all(end - start <= 64 for _, start, end in asked)
    assert dataset[2].tolist() == list(range(3, 43))
    assert len(asked) == blocks
    dataset.tokens[100:1000]  # a long run is one request and pushes nothing out
    assert asked[blocks:] == [("/bucket/a.bin", 200, 2000)]
    dataset[2]
    assert len(asked) == blocks + 1


def test_the_cache_is_bounded_and_drops_what_was_used_longest_ago(monkeypatch, url):
    dataset = IndexedDataset(url, cache_bytes=3 * 64)
    files = files_of(dataset)
    asked = requests_of(monkeypatch, dataset)
    for place in (0, 32, 64, 0, 96, 0, 32):  # blocks 0, 1, 2, 0, 3, 0, 1
        assert dataset.tokens[place] == place
    assert [start // 64 for _, start, _ in asked] == [0, 1, 2, 3, 1]
    assert len(files._blocks) == 3
    assert sum(map(len, files._blocks.values())) <= 3 * 64


def test_a_cache_smaller_than_a_block_is_refused(url):
    with pytest.raises(ValueError, match="cache_bytes=63 must be at least 64"):
        IndexedDataset(url, cache_bytes=63)


def test_f_107_a_short_read_is_tried_again_and_then_an_error(monkeypatch, url):
    dataset = IndexedDataset(url)
    short = [3]

    def answer(data):
        short[0] -= 1
        return data[:-7] if short[0] >= 0 else data

    asked = requests_of(monkeypatch, dataset, answer)
    assert dataset.tokens[0:32].tolist() == list(range(32))
    assert len(asked) == 4
    short[0] = 100
    with pytest.raises(OSError, match=r"a\.bin: failed 6 times.*gave 57 bytes, must give the 64"):
        dataset.tokens[32:64]
    assert len(asked) == 10


@pytest.mark.parametrize(
    ("error", "tries"),
    [(ConnectionError("reset"), 6), (RuntimeError("503"), 6), (PermissionError("no"), 1)],
)
def test_a_fault_is_tried_again_where_that_may_help(monkeypatch, url, error, tries):
    dataset = IndexedDataset(url)

    def answer(data):
        raise error

    asked = requests_of(monkeypatch, dataset, answer)
    with pytest.raises(OSError, match=str(error)):
        dataset.tokens[0]
    assert len(asked) == tries


def test_f_107_a_cut_file_is_refused_on_opening(url):
    memory = fsspec.filesystem("memory")
    data = memory.cat_file("/bucket/a.bin")
    memory.pipe_file("/bucket/a.bin", data[:-7])
    with pytest.raises(ValueError, match=rf"must hold {len(data)} bytes.*holds {len(data) - 7}"):
        IndexedDataset(url)
    memory.rm("/bucket/a.bin")
    with pytest.raises(FileNotFoundError):
        IndexedDataset(url)


def test_verify_finds_a_changed_byte(url):
    memory = fsspec.filesystem("memory")
    data = bytearray(memory.cat_file("/bucket/a.bin"))
    data[700] ^= 1
    memory.pipe_file("/bucket/a.bin", bytes(data))
    with pytest.raises(ValueError, match=r"memory://bucket/a\.bin: holds .* must hold"):
        IndexedDataset(url).verify()


def test_a_file_that_hides_its_size_is_refused(monkeypatch, url):
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "size", lambda self, path: None)
    with pytest.raises(ValueError, match="must tell its size"):
        IndexedDataset(url)


def test_pickles_as_its_url_and_options(url):
    dataset = IndexedDataset(
        url, cache_bytes=1 << 10, storage_options={"skip_instance_cache": True}
    )
    dataset.tokens[:]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert again._options == dataset._options
    assert again[2].tolist() == dataset[2].tolist()


def test_a_forked_process_connects_anew(url):
    dataset = IndexedDataset(url)
    files = files_of(dataset)
    first = files._system
    dataset[2]
    with files._lock:  # as if another thread read at that moment: the child has a lock of its own
        child = os.fork()
        if not child:
            signal.alarm(20)
            good = dataset[2].tolist() == list(range(3, 43)) and files._system is not first
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_read_at_once(url):
    dataset = IndexedDataset(url, cache_bytes=128)
    wrong = []

    def work(seed):
        for place in np.random.default_rng(seed).integers(0, 1255, 300).tolist():
            if dataset.tokens[place] != place:
                wrong.append(place)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_fsspec_a_url_names_the_extra(monkeypatch, prefix):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert len(IndexedDataset(prefix)) == 30
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'megablocks-core\[remote\]'"):
        IndexedDataset("memory://bucket/a")


def test_half_a_publication_is_read_as_the_new_dataset(prefix):
    """A bucket may be filled from a folder in which a builder was killed."""
    build = IndexedDataset(prefix).manifest.build
    for ending in (".idx", ".hashes"):
        shutil.move(f"{prefix}{ending}", f"{prefix}.{build}.tmp{ending}")
    dataset = IndexedDataset(f"file://{prefix}")
    dataset.verify()
    assert len(dataset) == 30
