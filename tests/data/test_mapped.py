"""Mapped files are views, which outlive their name."""

import os
import subprocess
import sys

import numpy as np
import pytest

from megablocks_core.data import IndexedDatasetBuilder
from megablocks_core.data.mapped import MappedFile, read_bytes


def test_parts_are_read_only_views(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(20)))
    file = MappedFile(str(tmp_path / "a"))
    assert file.size == 20
    assert bytes(file.read(3, 6)) == b"\3\4\5"
    assert bytes(file.read(18, 99)) == b"\x12\x13"
    assert read_bytes(str(tmp_path / "a")) == bytes(range(20))
    array = file.array("<u2", 2, 8)
    assert array.tolist() == [0x0302, 0x0504, 0x0706]
    assert np.shares_memory(array, file.array("u1", 0, 20))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_it_stays_the_same_when_another_file_takes_its_name(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    file = MappedFile(str(tmp_path / "a"))
    (tmp_path / "b").write_bytes(b"newer")
    (tmp_path / "b").replace(tmp_path / "a")
    assert bytes(file.read(0, 9)) == b"old"


def test_an_empty_file_maps_to_nothing(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    file = MappedFile(str(tmp_path / "a"))
    assert (file.size, bytes(file.read(0, 9))) == (0, b"")
    assert file.array("<i8", 0, 0).shape == (0,)


_READER = """
import sys
from megablocks_core.data import IndexedDataset
tokens = IndexedDataset(sys.argv[1]).tokens
assert int(tokens.sum()) == len(tokens)
print("read", flush=True)
sys.stdin.readline()  # until all have read
found, own = False, 0
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0]:
        found = line.rstrip().endswith(".bin")
    elif found and line.startswith("Pss:"):
        own += 1024 * int(line.split()[1])
print(own, flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="the system tells no shares")
def test_eight_ranks_of_a_host_hold_a_corpus_once(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "c", dtype=np.uint16) as builder:
        builder.add_document(np.ones(1 << 22, np.uint16))
    command = [sys.executable, "-c", _READER, str(tmp_path / "c")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    readers = [subprocess.Popen(command, **pipes) for _ in range(8)]
    try:
        assert [reader.stdout.readline() for reader in readers] == ["read\n"] * 8
        shares = []
        for reader in readers:
            reader.stdin.write("\n")
            reader.stdin.flush()
            shares.append(int(reader.stdout.readline()))
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    size = (tmp_path / "c.bin").stat().st_size
    assert 0.9 * size < sum(shares) < 1.2 * size
