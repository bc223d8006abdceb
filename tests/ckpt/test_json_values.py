"""What JSON would change is refused."""

import json

import pytest

from megablocks_core.ckpt.json_values import check_json


def test_json_is_what_json_gives_back():
    check_json({"a": [1, 2.5, "x", None, True, {"b": []}]}, "x")
    for value, path in (({"a": [0, (1,)]}, r"x\['a'\]\[1\]"), ({1: 2}, "x has the key 1")):
        with pytest.raises(ValueError, match=path):
            check_json(value, "x")


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_values_are_nested_up_to_a_depth(wrap):
    value = 1
    for _ in range(100):
        value = wrap(value)
    check_json(value, "x")
    assert json.loads(json.dumps(value)) == value
    with pytest.raises(ValueError, match="^x must not be nested more than 100 deep"):
        check_json(wrap(value), "x")
    circle = wrap(None)
    circle.append(circle) if isinstance(circle, list) else circle.update(a=circle)
    with pytest.raises(ValueError, match="^x must not be nested more than 100 deep"):
        check_json(circle, "x")


def test_ints_are_as_long_as_readers_take():
    for value in (2**8192 - 1, 1 - 2**8192):
        check_json(value, "x")
        assert json.loads(json.dumps(value)) == value
    with pytest.raises(ValueError, match=r"x\[0\] must be of at most 8192 bits, not 8193"):
        check_json([2**8192], "x")
