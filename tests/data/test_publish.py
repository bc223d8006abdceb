"""Whatever happens to a builder, a reader finds the old dataset or the new one, whole."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager

import numpy as np
import pytest
import xxhash

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder, publish
from megablocks_core.data.manifest import SUFFIX

FILES = ["a.bin", "a.hashes", "a.idx", "a.manifest.json"]
OLD, NEW = [[1, 1, 1], [1]], [[2, 2], [], [2, 2, 2]]


def build(prefix, documents, **options):
    with IndexedDatasetBuilder(prefix, dtype=np.int32, **options) as writer:
        for document in documents:
            writer.add_document(document)


def read(prefix):
    """The documents of a dataset, every byte of it checked; None where there is none."""
    try:
        dataset = IndexedDataset(prefix)
    except FileNotFoundError:
        return None
    dataset.verify()
    return [x.tolist() for x in dataset]


def read_without_manifest(prefix, aside):
    """The same for a reader that knows only the two files."""
    for ending in (".bin", ".idx"):
        if not os.path.exists(f"{prefix}{ending}"):
            return None
        shutil.copy(f"{prefix}{ending}", aside / f"plain{ending}")
    return read(aside / "plain")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def call_counted(monkeypatch, module, call, at):
    """``at()`` is called before each use of a function."""
    real = getattr(module, call)

    def counted(*args, **kwargs):
        at()
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, call, counted)
        yield


def start(work):
    """Run ``work`` in a forked process; its number."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def status_of(child):
    """Wait for a process; its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work):
    return status_of(start(work))


@pytest.fixture(autouse=True)
def a_disk_that_never_loses_power(monkeypatch):
    """Syncing is slow, and only power failure tells it apart."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def aside(tmp_path_factory):
    return tmp_path_factory.mktemp("aside")


STEPS = [("fsync", 14), ("replace", 4), ("remove", 4), ("open", 11)]
EACH_STEP = [(call, step) for call, steps in STEPS for step in range(steps + 1)]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("call", "failing"), EACH_STEP)
def test_a_failure_at_any_step_leaves_the_old_or_the_new(
    tmp_path, aside, monkeypatch, overwrite, call, failing
):
    if overwrite:
        build(tmp_path / "a", OLD)
    calls = []

    def fail():
        calls.append(call)
        if len(calls) == failing + 1:
            raise OSError(28, "No space left on device")

    failed = False
    with call_counted(monkeypatch, os, call, fail):
        try:
            build(tmp_path / "a", NEW, overwrite=overwrite)
        except OSError as error:
            failed = error.errno == 28
    assert failed == (len(calls) > failing)
    assert failing < dict(STEPS)[call] or not failed  # the last of them is not reached
    _old_or_new(tmp_path, aside, OLD if overwrite else None)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_before_any_step_leaves_the_old_or_the_new(tmp_path, aside, monkeypatch, overwrite):
    found = []
    for call, steps in STEPS:
        for dying in range(steps + 1):
            folder = tmp_path / f"{call}-{dying}"
            folder.mkdir()
            if overwrite:
                build(folder / "a", OLD)
            calls = []

            def die(calls=calls, dying=dying):
                calls.append(1)
                if len(calls) == dying + 1:
                    os.kill(os.getpid(), signal.SIGKILL)

            with call_counted(monkeypatch, os, call, die):
                status = in_child(lambda: build(folder / "a", NEW, overwrite=overwrite))  # noqa: B023
            assert status in (0, -signal.SIGKILL)
            assert dying < steps or not status  # the last of them was not reached
            found.append(_old_or_new(folder, aside, OLD if overwrite else None))
    old = OLD if overwrite else None
    assert {str(x) for x in found} == {str(old), str(NEW)}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("killed", [False, True], ids=["full", "killed"])
def test_f_130_any_byte_may_be_the_last_that_is_written(tmp_path, aside, overwrite, killed):
    """The kernel writes no byte past a limit: the call fails as on a full disk, or kills."""

    def limited(limit):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if killed else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        build(tmp_path / "a", NEW, overwrite=overwrite)

    found = []
    for limit in range(0, 1200, 61):
        if overwrite:
            build(tmp_path / "a", OLD, overwrite=True)
        status = in_child(lambda: limited(limit))  # noqa: B023
        assert status in (0, -signal.SIGXFSZ if killed else 1)
        if status and not killed:  # nothing is left behind
            assert names(tmp_path) == (FILES if overwrite else [])
        found.append(_old_or_new(tmp_path, aside, OLD if overwrite else None))
        for path in tmp_path.iterdir():
            path.unlink()
    old = OLD if overwrite else None
    assert found[0] == old
    assert found[-1] == NEW
    assert all(x in (old, NEW) for x in found)


def _old_or_new(folder, aside, old):
    """Check all that may be seen after a builder of NEW died; which dataset is there."""
    found = read(folder / "a")
    assert found in (old, NEW)
    assert read_without_manifest(folder / "a", aside) in (old, NEW, None)
    again = folder.parent / f"{folder.name}-again"
    shutil.copytree(folder, again)
    # The next builder finishes what was published, and clears away what was not.
    if found is None:
        build(again / "a", OLD)
        assert read(again / "a") == read_without_manifest(again / "a", aside) == OLD
    else:
        with pytest.raises(FileExistsError):
            build(again / "a", OLD)
        assert read(again / "a") == read_without_manifest(again / "a", aside) == found
        build(again / "a", [[3]], append=True)
        assert read(again / "a") == [*found, [3]]
    assert names(again) == FILES
    shutil.rmtree(again)
    return found


def test_of_two_builders_the_second_to_finish_fails(tmp_path):
    first, second = (IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32) for _ in range(2))
    first.add_document([1])
    second.add_document([2])
    second.finish()
    with pytest.raises(FileExistsError):
        first.finish()
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [2]
    assert names(tmp_path) == FILES


def test_of_two_builders_that_overwrite_the_last_to_finish_stands(tmp_path):
    build(tmp_path / "a", OLD)
    first, second = (
        IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32, overwrite=True) for _ in range(2)
    )
    first.add_document([1])
    second.add_document([2])
    second.finish()
    first.finish()
    assert read(tmp_path / "a") == [[1]]
    assert names(tmp_path) == FILES


def test_an_index_that_appears_in_the_meantime_is_kept(tmp_path):
    writer = IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32)
    (tmp_path / "a.idx").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"a\.idx exists"):
        writer.finish()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a.idx", b"precious")]


def test_what_a_killed_builder_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path):
    def killed():
        writer = IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32)
        writer.add_document(range(1 << 19))
        os.kill(os.getpid(), signal.SIGKILL)

    (tmp_path / "a.0123abcd.tmp.binary").write_bytes(b"precious")
    (tmp_path / "ab.0123abcd.tmp.bin").write_bytes(b"precious")
    assert in_child(killed) == -signal.SIGKILL
    assert len(names(tmp_path)) == 3
    alive = IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32)
    build(tmp_path / "a", NEW)
    alive.discard()
    assert names(tmp_path) == sorted([*FILES, "a.0123abcd.tmp.binary", "ab.0123abcd.tmp.bin"])


@pytest.mark.parametrize("copied", [False, True])
def test_a_file_that_is_adopted_is_published_and_lives_as_long_as_its_builder(
    tmp_path, monkeypatch, copied
):
    def refuse(*names):
        raise OSError(95, "Operation not supported")

    if copied:
        monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "b").mkdir()
    tokens = np.array([1, 2, 3], np.int32)
    tokens.tofile(tmp_path / "b" / "tokens")
    writer = IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32)
    adopted = writer._files.adopt(
        ".bin", tmp_path / "b" / "tokens", xxhash.xxh3_128(tokens.tobytes())
    )
    other = IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32)  # removes what is not alive
    other.discard()
    writer._lengths.append(3)
    writer._document_indices.append(1)
    writer._hashes.append(7)
    writer.finish()
    assert adopted.record().size == 12
    dataset = IndexedDataset(tmp_path / "a")
    dataset.verify()
    assert dataset[0].tolist() == [1, 2, 3]
    assert (tmp_path / "b" / "tokens").read_bytes() == tokens.tobytes()


def test_a_lock_left_by_a_killed_process_is_free(tmp_path):
    (tmp_path / "a.lock").write_bytes(b"")
    build(tmp_path / "a", NEW)
    assert names(tmp_path) == FILES


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(publish.fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"flock is needed.*a\.lock"):
        build(tmp_path / "a", NEW)


@pytest.mark.parametrize("step", range(6))
def test_a_reader_in_the_middle_of_a_publication_sees_one_of_both(tmp_path, monkeypatch, step):
    """The new dataset appears between two steps of the reader, each in turn."""
    build(tmp_path / "a", OLD)
    steps = []
    real_open, real_read = publish.open_ending, publish._read

    def stepping(real):
        def opened(*args):
            steps.append(1)
            if len(steps) == step + 1:
                build(tmp_path / "a", NEW, overwrite=True)
            return real(*args)

        return opened

    monkeypatch.setattr(publish, "open_ending", stepping(real_open))
    monkeypatch.setattr(publish, "_read", stepping(real_read))
    found = read(tmp_path / "a")
    assert found == (NEW if step < 4 else OLD)


def test_hashes_of_a_dataset_that_was_replaced_are_refused(tmp_path):
    build(tmp_path / "a", OLD)
    old = IndexedDataset(tmp_path / "a")
    build(tmp_path / "a", NEW, overwrite=True)
    assert [x.tolist() for x in old] == OLD
    with pytest.raises(ValueError, match=r"a\.hashes: holds .* by .*a\.manifest\.json"):
        old.content_hashes()


def test_a_prefix_replaced_all_the_time_is_given_up(tmp_path, monkeypatch):
    build(tmp_path / "a", OLD)
    monkeypatch.setattr(publish, "ATTEMPTS", 3)
    texts = iter([(tmp_path / f"a{SUFFIX}").read_bytes(), None] * 3)

    def never_twice(path):
        if (text := next(texts)) is None:
            raise FileNotFoundError
        return text

    with pytest.raises(OSError, match="was replaced 3 times while it was opened"):
        publish.open_published(lambda path: path, never_twice, str(tmp_path / "a"))


def build_again_and_again(prefix, number, times, **options):
    """Generations of documents that all hold one number, the builder's own."""
    for time_ in range(times):
        value = 1000 * number + time_
        try:
            build(prefix, [[value] * n for n in range(1, 2 + number)], **options)
        except FileExistsError:
            assert not options


def assert_one_generation(documents):
    values = {value for document in documents for value in document}
    assert len(values) == 1
    assert [len(x) for x in documents] == list(range(1, 2 + values.pop() // 1000))


def test_f_130_readers_see_whole_generations_while_two_builders_overwrite(tmp_path):
    """Builders and readers run at the same time, and each thing seen is one builder's whole."""
    build_again_and_again(tmp_path / "a", 1, 1)
    builders = [
        start(lambda n=n: build_again_and_again(tmp_path / "a", n, 40, overwrite=True))
        for n in (2, 3)
    ]
    seen = set()
    for builder in builders:
        while not os.waitid(os.P_PID, builder, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            documents = [x.tolist() for x in IndexedDataset(tmp_path / "a")]
            assert_one_generation(documents)
            seen.add(str(documents))
        assert status_of(builder) == 0
    assert len(seen) > 3
    assert names(tmp_path) == FILES


@pytest.mark.drill
@pytest.mark.parametrize("repeat", range(20))
def test_f_130_four_builders_at_once_and_one_is_killed(tmp_path, repeat):
    """Without ``overwrite`` one of four wins, and the one that was killed has left nothing."""
    builders = [start(lambda n=n: build_again_and_again(tmp_path / "a", n, 1)) for n in range(1, 5)]
    time.sleep(random.Random(repeat).uniform(0, 0.06))
    os.kill(builders[0], signal.SIGKILL)
    assert [status_of(builder) for builder in builders][1:] == [0, 0, 0]
    assert_one_generation(read(tmp_path / "a"))
    with pytest.raises(FileExistsError):
        build(tmp_path / "a", NEW)
    assert names(tmp_path) == FILES


@pytest.mark.drill
def test_random_kills_of_builders_that_overwrite(tmp_path):
    build_again_and_again(tmp_path / "a", 1, 1)
    delays = random.Random(0)
    for number in range(300):
        builder = start(
            lambda n=number: build_again_and_again(tmp_path / "a", 1 + n % 5, 9999, overwrite=True)
        )
        time.sleep(delays.uniform(0.005, 0.1))
        os.kill(builder, signal.SIGKILL)
        assert status_of(builder) == -signal.SIGKILL
        assert_one_generation(read(tmp_path / "a"))
    build(tmp_path / "a", NEW, overwrite=True)
    assert names(tmp_path) == FILES


@pytest.mark.drill
@pytest.mark.parametrize("kilobytes", [64, 128, 200])
def test_a_real_full_disk_leaves_the_old(tmp_path, aside, kilobytes):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(tmp_path)],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        build(tmp_path / "a", OLD)
        with pytest.raises(OSError, match="No space left"):
            build(tmp_path / "a", [range(30_000)] * 4, overwrite=True)
        assert read(tmp_path / "a") == read_without_manifest(tmp_path / "a", aside) == OLD
        assert names(tmp_path) == FILES
        build(tmp_path / "a", NEW, overwrite=True)
        assert read(tmp_path / "a") == NEW
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("ending", [".bin", ".hashes", ".idx", ".manifest.json"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_is_written(tmp_path, ending):
    (tmp_path / f"a{ending}").mkdir()
    with pytest.raises(FileExistsError, match=f"a{ending} is a folder"):
        IndexedDatasetBuilder(tmp_path / "a", dtype=np.uint16, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [f"a{ending}"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none: must be a folder that exists, for prefix="):
        IndexedDatasetBuilder(tmp_path / "none" / "a", dtype=np.uint16)
