"""What arguments must be: whole numbers, rows and pairs of them, names of files.

Each function returns the argument in the one type that the code behind it knows, so that a number
of NumPy or torch is as good as an ``int``, and raises ``ValueError`` with name, value and rule.
"""

import os
import reprlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import isfinite
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 2**63 - 1  # what int64 holds, and the longest that Python lets anything be


def whole_number(name: str, value: Any, least: int | None = None, most: int = MOST) -> int:
    """Return a whole number; a float is none, even one without a fraction."""
    try:
        number = index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be a whole number") from None
    if least is not None and not least <= number <= most:
        open_above = most == MOST and number < least
        rule = f"at least {least}" if open_above else f"between {least} and {_shown(most)}"
        raise ValueError(f"{name}={number} must be {rule}")
    return number


def row(name: str, values: Any) -> NDArray[np.int64]:
    """Return whole numbers [n] as an array of its own."""
    try:
        given = np.asarray(values)
    except (TypeError, ValueError, OverflowError):  # ragged, or of no type that NumPy knows
        given = None
    if (
        given is None
        or given.ndim != 1
        or (given.size and given.dtype.kind not in "iu")
        or (given.dtype == np.uint64 and given.max(initial=0) > MOST)
    ):
        raise ValueError(f"{name}={reprlib.repr(values)} must be one row of whole numbers")
    return given.astype(np.int64)


def bounds(name: str, values: Any, end: int | None = None) -> NDArray[np.int64]:
    """Return where documents that lie end to end begin, and the last one ends: 0 to ``end``."""
    found = row(name, values)
    if (
        not len(found)
        or found[0] != 0
        or (found[1:] < found[:-1]).any()
        or (end is not None and found[-1] != end)
    ):
        last = "" if end is None else f" and end at {end}"
        raise ValueError(f"{name}={reprlib.repr(values)} must begin at 0, never fall{last}")
    return found


def pairs(name: str, values: Any, rule: str) -> list[tuple[Any, Any]]:
    """Return a sequence of pairs as a list of tuples."""
    try:
        return [(first, second) for first, second in values]
    except (TypeError, ValueError):
        raise ValueError(f"{name}={values!r} must be {rule}") from None


def real(name: str, value: Any, *, finite: bool = True) -> int | float:
    """Return a number that is 0 or more: an ``int`` if it is whole, else a ``float``."""
    with suppress(TypeError, ValueError, OverflowError):
        number = int(value) if isinstance(value, int | np.integer) else float(value)
        if number >= 0 and not isinstance(value, str | bytes):
            if isfinite(number):
                return int(number) if number == int(number) else number
            if not finite:
                return number
    raise ValueError(f"{name}={value!r} must be a number, 0 or more" + ", and finite" * finite)


def prefix_of(prefix: Any) -> str:
    """Return the prefix of a dataset as text: a URL, or a path that ``chdir`` does not move."""
    name = os.fspath(prefix) if isinstance(prefix, str | os.PathLike) else None
    if not isinstance(name, str) or not name or name.endswith("/"):
        raise ValueError(f"prefix={prefix!r} must be a path: that of the files without endings")
    return name if "://" in name else os.path.abspath(name)


def several(name: str, values: Any) -> Iterable[Any]:
    """Return what can be gone through, and is no text of characters."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={reprlib.repr(values)} must be several, such as a list of one")
    return values


def different_names(names: Sequence[str]) -> list[str]:
    """Return names, no two of which are equal."""
    given = list(several("names", names))
    if not all(isinstance(name, str) for name in given) or len(set(given)) < len(given):
        raise ValueError(f"names={given} must be texts, no two of them equal")
    return given


def _shown(number: int) -> str:
    power = (number + 1).bit_length() - 1
    return f"2**{power} - 1" if number + 1 == 1 << power and power > 16 else str(number)
