"""Any format to any other, whole or not at all."""

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import numpy as np
import pytest

from megablocks_core.data import IndexedDataset
from megablocks_core.data.convert import convert
from megablocks_core.files import disk

from .conftest import contents, documents, some_documents, write

FOLDERS = ["datasets", "olmo", "mds"]
OLMO = {"source_dtype": "uint16"}


def test_any_format_becomes_any_other(tmp_path):
    rows = some_documents(end=0)
    prefix = write(tmp_path / "x", rows)
    for first in FOLDERS:
        convert(prefix, f"{first}:{tmp_path / first}", shard_bytes=50_000)
        for second in FOLDERS:
            options = OLMO if first == "olmo" else {}
            there = f"{second}:{tmp_path / first}-{second}"
            report = convert(f"{first}:{tmp_path / first}", there, **options)
            assert (report.documents, report.tokens) == (len(rows), sum(map(len, rows)))
            back = tmp_path / f"{first}-{second}-back"
            convert(there, back, **(OLMO if second == "olmo" else {}))
            assert contents(back) == contents(prefix)


def test_a_conversion_is_the_same_each_time(tmp_path, corpus):
    prefix, _ = corpus
    for kind in FOLDERS:
        seen = []
        for name in ("a", "b"):
            folder = tmp_path / f"{kind}-{name}"
            convert(prefix, f"{kind}:{folder}")
            seen.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert seen[0] == seen[1]


def test_a_dataset_without_documents(tmp_path):
    prefix = write(tmp_path / "x", [])
    report = convert(prefix, f"datasets:{tmp_path / 'h'}")
    assert (report.documents, report.files) == (0, 1)
    convert(f"datasets:{tmp_path / 'h'}", tmp_path / "y")
    assert contents(tmp_path / "y") == contents(prefix)
    for kind in ("olmo", "mds"):
        with pytest.raises(ValueError, match="has no documents, and a folder of none"):
            convert(prefix, f"{kind}:{tmp_path / kind}")
        assert not list(tmp_path.glob(f"*{kind}*"))


def test_memory_does_not_grow_with_the_dataset(tmp_path):
    """A child that may not hold the dataset twice converts it through every format."""
    tokens, length = 20_000_000, 4_000
    prefix = write(tmp_path / "x", np.ones((tokens // length, length)), "int32")
    code = """
import resource, sys
from megablocks_core.data.convert import convert
import pyarrow, pyarrow.ipc, zstandard
folder = sys.argv[1]
held = int(open("/proc/self/statm").read().split()[5]) * 4096  # data and stack
resource.setrlimit(resource.RLIMIT_DATA, (held + (50 << 20), -1))
convert(f"{folder}/x", f"datasets:{folder}/h")
convert(f"datasets:{folder}/h", f"mds:{folder}/m", shard_bytes=1 << 22)
convert(f"mds:{folder}/m", f"olmo:{folder}/o")
convert(f"olmo:{folder}/o", f"{folder}/y", source_dtype="uint32")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert contents(tmp_path / "y") == contents(prefix)
    assert IndexedDataset(prefix).tokens.nbytes > 75 << 20


@pytest.mark.parametrize("target", [*FOLDERS, "idx"])
def test_a_full_disk_leaves_nothing(tmp_path, corpus, target):
    prefix, _ = corpus
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    quiet = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        with pytest.raises(OSError):
            convert(prefix, f"{target}:{tmp_path / 'y'}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, quiet)
    assert sorted(os.listdir(tmp_path)) == [
        "corpus.bin",
        "corpus.hashes",
        "corpus.idx",
        "corpus.manifest.json",
    ]


@pytest.mark.parametrize("target", FOLDERS)
def test_a_target_appears_after_all_of_it_was_synced(tmp_path, corpus, target, monkeypatch):
    prefix, _ = corpus
    seen = []

    def rename(old, new):
        seen.append(("rename", new.name, sorted(os.listdir(old))))
        os.rename(old, new)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(disk, "rename", rename)
    convert(prefix, f"{target}:{tmp_path / 'y'}", shard_bytes=90_000)
    assert seen == [("rename", "y", sorted(os.listdir(tmp_path / "y")))]
    monkeypatch.setattr(disk, "rename", stop)  # Ctrl-C at the last moment
    with pytest.raises(KeyboardInterrupt):
        convert(prefix, f"{target}:{tmp_path / 'z'}")
    assert not list(tmp_path.glob("*z*"))


@pytest.mark.parametrize("target", [*FOLDERS, "idx"])
def test_a_kill_leaves_nothing_under_the_name(tmp_path, target):
    prefix = write(tmp_path / "x", np.ones((5_000, 500)), "uint16")
    code = "import sys; from megablocks_core.data.convert import convert; convert(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(prefix), f"{target}:{tmp_path / 'y'}"]
    before = set(os.listdir(tmp_path))
    with subprocess.Popen(command) as process:
        while not set(os.listdir(tmp_path)) - before and process.poll() is None:
            time.sleep(0.001)
        process.kill()
    left = set(os.listdir(tmp_path)) - before
    assert not left & {"y", "y.idx", "y.manifest.json"}
    convert(prefix, f"{target}:{tmp_path / 'y'}")
    back = f"{target}:{tmp_path / 'y'}"
    convert(back, tmp_path / "z", **(OLMO if target == "olmo" else {}))
    assert contents(tmp_path / "z") == contents(prefix)


@pytest.mark.parametrize("target", FOLDERS)
def test_a_folder_that_holds_something_is_refused(tmp_path, corpus, target):
    prefix, _ = corpus
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "mine").write_text("x")
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        convert(prefix, f"{target}:{tmp_path / 'y'}")
    assert os.listdir(tmp_path / "y") == ["mine"]


def test_a_dataset_is_replaced_only_where_asked(tmp_path, corpus):
    prefix, rows = corpus
    write(tmp_path / "y", [[1]])
    with pytest.raises(FileExistsError):
        convert(prefix, tmp_path / "y")
    assert documents(tmp_path / "y") == [[1]]
    convert(prefix, tmp_path / "y", overwrite=True)
    assert documents(tmp_path / "y") == rows


@pytest.mark.parametrize(
    ("source", "target", "options", "told"),
    [
        ("x", "olmo:y", {"eos": "3"}, "eos='3' must be a whole number"),
        ("x", "mds:y", {"shard_bytes": 0}, "shard_bytes=0 must be at least 1"),
        ("datasets:y", "z", {"column": 3}, "column=3 must be the name of one"),
        ("x", "datasets:", {}, r"target='datasets:' must have a path after datasets:"),
        ("x", "", {}, "target='' must be a path, or a format and a path"),
        (5, "y", {}, "source=5 must be a path"),
        ("x", "s3://b/y", {}, "target='s3://b/y' must be on this machine"),
        ("x", "idx:x", {}, "must be another than the source"),
        ("x", "y", {"compression": "zstd"}, "compression='zstd' is of mds: alone"),
        ("x", "mds:y", {"compression": "gz"}, "compression='gz' must be zstd"),
        ("x", "mds:y", {"overwrite": True}, "overwrite=True replaces an indexed dataset alone"),
        ("x", "mds:y", {"shard_bytes": 1 << 32}, "must be below 2[*][*]32"),
        ("x", "mds:y", {"shard_bytes": -1}, "shard_bytes=-1 must be at least 1"),
        ("x", "mds:y", {"eos": 0}, "eos=0 is of olmo: alone"),
        ("x", "y", {"column": "a"}, "column='a' is of datasets: and mds:, not of idx:"),
        ("x", "y", {"source_dtype": "uint8"}, "source_dtype=uint8 is of olmo: and mds:"),
        ("x", "y", {"source_dtype": "word"}, "source_dtype='word' must be a dtype such as"),
        ("x", "y", {"target_dtype": "word"}, "target_dtype='word' must be a dtype such as"),
        ("x", "y", {"target_dtype": "uint32"}, "must be one of uint8"),
        ("x", "mds:y", {"target_dtype": "float16"}, "target_dtype=float16 must be one of uint8"),
        ("x", "y", {"tokenizer": "bytes"}, "tokenizer='bytes' is for texts"),
        ("x", "y", {"append_eod": True}, "is for texts"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, monkeypatch, source, target, options, told):
    monkeypatch.chdir(tmp_path)
    write("x", [[1, 2]])
    before = sorted(os.listdir())
    with pytest.raises(ValueError, match=told):
        convert(source, target, **options)
    assert sorted(os.listdir()) == before


def test_the_report_says_all_that_is_counted(tmp_path):
    prefix = write(tmp_path / "x", [[1, 0], [0, 1]])
    report = convert(prefix, f"olmo:{tmp_path / 'o'}", eos=0)
    assert asdict(report) == {
        "documents": 2,
        "tokens": 5,
        "dtype": "uint16",
        "files": 1,
        "empty": 0,
        "joined": 0,
        "unterminated": 0,
        "ends_added": 1,
        "inner_ends": 1,
    }
