"""Patterns of dotted names, as modules and parameters have.

The one rule of all parts that take patterns: ``*`` stands for any part of one step of a name,
``**`` for any part of the name, ``?`` for a letter, ``[ab]`` for one of some letters and ``[!ab]``
for another one; all else stands for itself, and the case of letters counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Chosen(NamedTuple):
    """Names that patterns match, in the order given, and patterns that match none."""

    names: list[str]
    unmatched: list[str]


def chosen(
    names: Iterable[str],
    patterns: str | Sequence[str],
    *,
    ends: bool = False,
    across: bool = False,
) -> Chosen:
    """What ``patterns``, one or some, match of ``names``; see ``matcher``."""
    names = list(names)
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    by_pattern = [list(filter(matcher(p, ends=ends, across=across), names)) for p in patterns]
    found = {name for matched in by_pattern for name in matched}
    unmatched = [p for p, matched in zip(patterns, by_pattern, strict=True) if not matched]
    return Chosen([name for name in names if name in found], unmatched)


def matcher(pattern: str, *, ends: bool = False, across: bool = False) -> Callable[[str], bool]:
    """Say of a name whether ``pattern`` matches it.

    Args:
        pattern: By the rule above.
        ends: The last steps of a name are enough, unless the pattern is empty.
        across: ``*`` goes over steps as ``**`` does, and ``?`` may be a dot.
    """
    one = "." if across else "[^.]"
    known = {"**": ".*", "*": f"{one}*", "?": one}
    parts = (
        known.get(part) or (_letters(part) if number % 2 else re.escape(part))
        for number, part in enumerate(re.split(r"(\*\*|\*|\?|\[!?[^\]]+\])", pattern))
    )
    before = r"(?:.*\.)?" if ends and pattern else ""
    match = re.compile(before + "".join(parts), re.DOTALL).fullmatch
    return lambda name: match(name) is not None


def _letters(brackets: str) -> str:
    """``[ab]`` or ``[!ab]`` of a pattern as one of a regular expression; ``a-c`` is a range."""
    inside = brackets[1:-1]
    no = inside.startswith("!")
    letters = inside[no:].replace("\\", r"\\").replace("^", r"\^").replace("[", r"\[")
    return f"[{'^' * no}{letters}]"
