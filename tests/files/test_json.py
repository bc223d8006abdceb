"""A JSON file that is not what it should be is named."""

import pytest

from megablocks_core.files import read_json


@pytest.mark.parametrize("kind", [dict, list])
def test_a_value_of_the_kind_is_read(tmp_path, kind):
    path = tmp_path / "a.json"
    path.write_text('{"a": "\u00e9"}' if kind is dict else '["\u00e9"]', encoding="utf-8")
    assert read_json(path, kind) == ({"a": "\u00e9"} if kind is dict else ["\u00e9"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, r"a\.json is missing"),
        (b"{", r"a\.json is not JSON: "),
        (b'"\xff"', r"a\.json is not JSON: "),
        (b"[]", r"a\.json must hold a dict at its top"),
    ],
)
def test_anything_else_is_refused(tmp_path, data, message):
    path = tmp_path / "a.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_json(path, dict)
