"""Every fault is named, each with its file."""

import shutil

import numpy as np
import pytest

from megablocks_core.data.tools import verify

from .conftest import build


@pytest.fixture
def prefix(tmp_path):
    return build(tmp_path / "a", [[1, 2, 3], [4], [5, 6]], np.int32)


def change(path, place, value=b"\xee"):
    data = bytearray(path.read_bytes())
    data[place : place + len(value)] = value
    path.write_bytes(bytes(data))


def test_what_is_whole_has_no_fault(prefix, tmp_path):
    found = verify(prefix, vocab_size=7)
    assert found.faults == []
    sizes = [(tmp_path / f"a{ending}").stat().st_size for ending in (".bin", ".hashes", ".idx")]
    assert found.hashed == sum(sizes)
    (tmp_path / "a.manifest.json").unlink()
    assert (verify(prefix).faults, verify(prefix).hashed) == ([], 0)
    assert verify(f"file://{tmp_path}/a").faults == []


def test_all_faults_are_named(prefix, tmp_path):
    change(tmp_path / "a.bin", 12)
    change(tmp_path / "a.hashes", 0)
    faults = verify(prefix, vocab_size=100).faults
    assert len(faults) == 3
    assert f"{prefix}.bin: is of xxh3-128" in faults[0]
    assert f"{prefix}.hashes: is of xxh3-128" in faults[1]
    assert "1 tokens are no ids below vocab_size=100; the first is token 3" in faults[2]


def test_a_changed_document_is_named_by_its_recorded_hash(prefix, tmp_path):
    change(tmp_path / "a.bin", 12)
    _, last = verify(prefix).faults
    assert last.endswith("1 documents are not what was written, the first of them document 1")


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_cut_file_and_a_missing_one(prefix, tmp_path, ending):
    path = tmp_path / f"a{ending}"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    faults = verify(prefix).faults
    assert f"{path}: holds {len(whole) - 1} bytes, must hold {len(whole)}" in faults
    path.unlink()
    assert verify(prefix).faults == [f"{path}: is missing, must hold {len(whole)} bytes"]


def test_a_damaged_index_without_a_manifest(prefix, tmp_path):
    (tmp_path / "a.manifest.json").unlink()
    change(tmp_path / "a.idx", 34 + 4 * 3 + 8)  # where sequence 1 begins
    (fault,) = verify(prefix).faults
    assert fault.startswith(f"{prefix}.idx: sequence 1 begins at byte")
    for file in tmp_path.iterdir():
        file.unlink()
    (fault,) = verify(prefix).faults
    assert "No such file" in fault


def test_a_damaged_manifest_and_one_of_other_files(prefix, tmp_path):
    other = build(tmp_path / "b", [[1, 2, 3], [4], [5, 7]], np.int32)
    shutil.copy(f"{other}.manifest.json", f"{prefix}.manifest.json")
    faults = verify(prefix).faults
    assert [fault.split(":")[0] for fault in faults[:2]] == [f"{prefix}.bin", f"{prefix}.hashes"]
    change(tmp_path / "a.manifest.json", 5)
    assert "is no manifest of a dataset" in verify(prefix).faults[0]


def test_arguments(prefix):
    with pytest.raises(ValueError, match="vocab_size=0 must be"):
        verify(prefix, vocab_size=0)
    with pytest.raises(ValueError, match="prefix='' must be a path"):
        verify("")
