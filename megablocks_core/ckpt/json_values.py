"""Values that JSON gives back as they were; floats, large ints and NaN included."""

from __future__ import annotations

from typing import Any


def check_json(value: Any, what: str) -> None:
    """Refuse what JSON would change: tuples, keys that are not strings, NumPy scalars.

    Raises:
        ValueError: Such a value, named by its path below ``what``.
    """
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(f"{what} has the key {key!r}; keys must be strings")
            check_json(item, f"{what}[{key!r}]")
    elif type(value) is list:
        for index, item in enumerate(value):
            check_json(item, f"{what}[{index}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise ValueError(
            f"{what} of type {type(value).__name__} must be a module, optimizer, tensor "
            "or JSON value (str, int, float, bool, None, list, dict)"
        )
