"""Places read and write as the rest of the package expects."""

import pytest

from megablocks_core.ckpt.places import LocalPlace, place_of


def test_files_of_a_folder(tmp_path):
    place = place_of(tmp_path).child("a")
    (tmp_path / "a").mkdir()
    assert place.read("f") is None and place.size("f") is None
    place.put("f", b"one")
    with pytest.raises(FileExistsError):
        place.put("f", b"two")
    assert place.read("f") == b"one" and place.size("f") == 3
    place.replace("f", b"three")
    assert place.read("f") == b"three"
    assert str(place.child("f")) == str(tmp_path / "a" / "f")


def test_parts_of_files_in_any_order(tmp_path):
    place = LocalPlace(tmp_path)
    sink = place.create("f")
    sink.write([memoryview(b"cd"), memoryview(b""), memoryview(b"e")], 2)
    sink.write([memoryview(b"ab")], 0)
    sink.finish()
    sink.close()
    one, two = bytearray(2), bytearray(2)
    with place.open("f") as source:
        source.read([memoryview(one), memoryview(b""), memoryview(two)], 1)
        assert bytes(one + two) == b"bcde"
        with pytest.raises(EOFError, match="ends before byte 6"):
            source.read([memoryview(one), memoryview(two)], 3)
