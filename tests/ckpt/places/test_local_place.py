"""A folder of a file system does what a place must."""

import os
from contextlib import closing

import pytest

from megablocks_core.ckpt.places.local_place import LocalPlace


def test_files_of_a_folder(tmp_path):
    place = LocalPlace(tmp_path).child("a")
    assert place.names() == ([], []) and place.leftovers() == [] and not place.is_there()
    (tmp_path / "a").mkdir()
    assert place.read("f") is None and place.size("f") is None and place.is_there()
    place.put("f", b"one")
    with pytest.raises(FileExistsError):
        place.put("f", b"two")
    assert place.read("f") == b"one" and place.size("f") == 3
    place.replace("f", b"three")
    assert place.read("f") == b"three"
    (tmp_path / "a" / "sub").mkdir()
    assert place.names() == (["sub"], ["f"])
    for _ in range(2):
        place.delete("f")
    assert place.names() == (["sub"], [])
    assert str(place.child("f")) == str(tmp_path / "a" / "f")


def test_parts_of_files(tmp_path):
    place = LocalPlace(tmp_path)
    sink = place.create("f")
    sink.write([memoryview(b"ab")], 0)
    sink.write([memoryview(b"cd"), memoryview(b""), memoryview(b"e")], 2)
    sink.finish()
    sink.close()
    one, two = bytearray(2), bytearray(2)
    with closing(place.open("f")) as source:
        source.read([memoryview(one), memoryview(b""), memoryview(two)], 1)
        assert bytes(one + two) == b"bcde"
        with pytest.raises(EOFError, match="ends before byte 6"):
            source.read([memoryview(one), memoryview(two)], 3)


def test_a_draft_is_seen_when_committed(tmp_path):
    place = LocalPlace(tmp_path / "run")
    draft = place.draft("a")
    draft.staging.put("f", b"1")
    assert place.names() == ([], []) and place.leftovers() == os.listdir(tmp_path / "run")
    draft.commit("last", b"2")
    assert place.names() == (["a"], []) and place.leftovers() == []
    assert place.child("a").names() == ([], ["f", "last"])
    draft.withdraw()
    assert place.names() == ([], []) and len(place.leftovers()) == 1
    draft.discard()
    assert os.listdir(tmp_path / "run") == []


def test_folders_and_leftovers_are_removed(tmp_path):
    place = LocalPlace(tmp_path)
    (tmp_path / "a" / "sub").mkdir(parents=True)
    (tmp_path / "a" / "sub" / "f").write_text("f")
    place.draft("b").staging.put("f", b"")
    for name in ["a", *place.leftovers()]:
        place.remove(name)
    assert os.listdir(tmp_path) == []


def test_free_bytes_before_the_folder_is_there(tmp_path):
    free = LocalPlace(tmp_path / "a" / "b").free_bytes()
    assert free is not None and free > 0
    assert LocalPlace(tmp_path.joinpath("/proc/self/x")).free_bytes() is None


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "f").write_text("f")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path)
    assert LocalPlace(tmp_path / "f").is_file() and LocalPlace(tmp_path / "broken").is_file()
    for name in ("", "link", "none"):
        assert not LocalPlace(tmp_path / name).is_file()
