"""What JSON would change is refused."""

import pytest

from megablocks_core.ckpt.json_values import check_json


def test_json_is_what_json_gives_back():
    check_json({"a": [1, 2.5, "x", None, True, {"b": []}]}, "x")
    for value, path in (({"a": [0, (1,)]}, r"x\['a'\]\[1\]"), ({1: 2}, "x has the key 1")):
        with pytest.raises(ValueError, match=path):
            check_json(value, "x")
