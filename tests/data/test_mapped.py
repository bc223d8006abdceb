"""Mapped files are views, which outlive their name."""

import numpy as np
import pytest

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
