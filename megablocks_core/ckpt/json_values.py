"""Values that JSON gives back as they were; floats, large ints and NaN included."""

from __future__ import annotations

from typing import Any

# Readers of JSON give up at some depth, and at some length of a number: Python's at about 1,000
# and at 4,300 digits.
_MOST_DEPTH, _MOST_BITS = 100, 2**13


def check_json(value: Any, what: str) -> None:
    """Refuse what JSON would change, or not give back: tuples, keys that are not strings, NumPy
    scalars, ints of more than 8,192 bits, lists and dicts more than 100 deep or within themselves.

    Raises:
        ValueError: Such a value, named by its path below ``what``.
    """
    _check(value, what, what, _MOST_DEPTH)


def _check(value: Any, what: str, outermost: str, depth: int) -> None:
    if depth == 0 and type(value) in (dict, list):
        raise ValueError(
            f"{outermost} must not be nested more than {_MOST_DEPTH} deep, or hold itself"
        )
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(f"{what} has the key {key!r}; keys must be strings")
            _check(item, f"{what}[{key!r}]", outermost, depth - 1)
    elif type(value) is list:
        for index, item in enumerate(value):
            _check(item, f"{what}[{index}]", outermost, depth - 1)
    elif type(value) is int and value.bit_length() > _MOST_BITS:
        raise ValueError(f"{what} must be of at most {_MOST_BITS} bits, not {value.bit_length()}")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise ValueError(
            f"{what} of type {type(value).__name__} must be a module, optimizer, tensor "
            "or JSON value (str, int, float, bool, None, list, dict)"
        )
