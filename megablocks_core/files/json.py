"""JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

T = TypeVar("T", dict, list)


def read_json(path: Path, kind: type[T]) -> T:
    """The value in a JSON file, which must be of ``kind`` at its top.

    Raises:
        ValueError: There is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(f"{path} must hold a {kind.__name__} at its top")
    return value
