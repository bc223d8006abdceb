"""Which block stands where in a hybrid model, as a string of one letter a block.

``M`` Mamba, ``G`` gated delta net, ``*`` attention, ``-`` feed-forward layer, ``E`` mixture of
experts; ``|`` bounds a pipeline stage. These are the letters of Megatron's and Nemotron-H's
patterns (https://arxiv.org/abs/2504.03624).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from numbers import Real

from megablocks_core.parallel.checks import check_mapping, check_whole

MAMBA, DELTA, ATTENTION, FEED_FORWARD, EXPERTS = "M", "G", "*", "-", "E"
STAGE = "|"
BLOCKS = {
    MAMBA: "Mamba",
    DELTA: "gated delta net",
    ATTENTION: "attention",
    FEED_FORWARD: "feed-forward layer",
    EXPERTS: "mixture of experts",
}


def blocks_of(pattern: str) -> str:
    """The letters of the blocks alone, one a block.

    Raises:
        ValueError: It is no string, a letter is unknown, or a stage has no block.
    """
    if not isinstance(pattern, str):
        raise ValueError(f"pattern={pattern!r} must be a string")
    unknown = sorted(set(pattern) - {*BLOCKS, STAGE})
    if unknown:
        known = ", ".join(f"{letter!r} ({name})" for letter, name in BLOCKS.items())
        raise ValueError(f"pattern={pattern!r} has {unknown} and may have {known} and {STAGE!r}")
    if not all(pattern.split(STAGE)):
        raise ValueError(f"pattern={pattern!r} must have a block in every stage")
    return pattern.replace(STAGE, "")


def stages_of(pattern: str) -> list[range]:
    """The numbers of each pipeline stage's blocks; a pattern without bounds is one stage.

    Raises:
        ValueError: As ``blocks_of``.
    """
    blocks_of(pattern)
    ends = accumulate((len(stage) for stage in pattern.split(STAGE)), initial=0)
    return [range(start, stop) for start, stop in pairwise(ends)]


def pattern_of_ratios(num_layers: int, ratios: Mapping[str, float], *, rest: str = MAMBA) -> str:
    """A pattern in which each kind has its share of the blocks, spread evenly.

    Of each kind there are ``round(ratio * num_layers)`` blocks. In the order of ``ratios``, the
    blocks of a kind are put in the middles of equal parts of the places that are left.

    Args:
        num_layers: Blocks in all.
        ratios: A block's letter to its share, between 0 and 1.
        rest: The letter of all other blocks.

    Raises:
        ValueError: A letter is unknown, a share is out of range, or there are more blocks than
            ``num_layers``.
    """
    check_whole("num_layers", num_layers, least=1)
    check_mapping("ratios", ratios)
    for letter, ratio in {**ratios, rest: 0.0}.items():
        if letter not in BLOCKS or not isinstance(ratio, Real) or not 0 <= ratio <= 1:
            raise ValueError(
                f"ratios={dict(ratios)} and rest={rest!r} must be of letters among "
                f"{', '.join(BLOCKS)} and between 0 and 1"
            )
    pattern, free = [rest] * num_layers, list(range(num_layers))
    for letter, ratio in ratios.items():
        count = round(ratio * num_layers)
        if count > len(free):
            raise ValueError(f"ratios={dict(ratios)} must be of {num_layers} blocks at most")
        chosen = [free[(2 * n + 1) * len(free) // (2 * count)] for n in range(count)]
        for place in chosen:
            pattern[place] = letter
        free = [place for place in free if place not in chosen]
    return "".join(pattern)
