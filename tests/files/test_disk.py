"""A write is all or an error, however little the system takes at a time."""

import os

import pytest

from megablocks_core.files import disk


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_short_writes_are_continued(tmp_path, monkeypatch, most):
    real = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda file, parts, at: real(file, [b"".join(parts)[:most]], at)
    )
    file = disk.create(tmp_path / "f")
    disk.write(file, [memoryview(b"ab"), memoryview(b""), memoryview(b"cde")], 2)
    os.close(file)
    assert (tmp_path / "f").read_bytes() == b"\0\0abcde"


def test_a_system_that_takes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    file = disk.create(tmp_path / "f")
    with pytest.raises(OSError, match="wrote nothing"):
        disk.write(file, [memoryview(b"a")], 0)
    os.close(file)


def test_names(tmp_path):
    disk.make_folder(tmp_path / "a")
    with pytest.raises(FileExistsError):
        disk.make_folder(tmp_path / "a")
    disk.make_folder(tmp_path / "a", exist_ok=True)
    for name in "fg":
        os.close(disk.create(tmp_path / "a" / name))
    with pytest.raises(FileExistsError):
        disk.create(tmp_path / "a" / "f")
    disk.replace(tmp_path / "a" / "f", tmp_path / "a" / "g")
    disk.rename(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "b") == ["g"]
    disk.remove_file(tmp_path / "b" / "g")
    disk.remove_folder(tmp_path / "b")
    assert os.listdir(tmp_path) == []


def test_beginning_to_sync_changes_nothing(tmp_path):
    file = disk.create(tmp_path / "f")
    disk.write(file, [memoryview(b"abc")], 0)
    disk.begin_sync(file, 0, 3)
    disk.sync(file)
    os.close(file)
    assert (tmp_path / "f").read_bytes() == b"abc"
