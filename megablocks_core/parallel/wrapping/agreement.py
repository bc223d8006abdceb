"""A check that ranks which work together were given the same options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megablocks_core.groups import Group


def words_of(**options: object) -> dict[str, str]:
    """Options in words, which ranks compare."""
    return {name: repr(value) for name, value in options.items()}


def check_agreed(words: Mapping[str, str], *, groups: Iterable[Group]) -> None:
    """Compare words with those of the other ranks. Sends a gather of them over each group.

    Args:
        words: By name.
        groups: In an order that all ranks share; of one rank, nothing is compared.

    Raises:
        ValueError: On all ranks of the group; it names the first that differs.
    """
    for group in dict.fromkeys(groups):
        if group.size > 1:
            found = group.all_gather_object(dict(words))
            for rank, others in zip(group.ranks, found, strict=True):
                compare_words(words, others, rank)


def compare_words(mine: Mapping[str, str], theirs: Mapping[str, str], rank: int) -> None:
    """Raise unless another rank has the same words.

    Raises:
        ValueError: It names the first that differs.
    """
    for name in sorted({*mine, *theirs}):
        here, there = mine.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            raise ValueError(
                f"{name} must be the same on all ranks: it is {here} here and {there} on rank "
                f"{rank}"
            )
