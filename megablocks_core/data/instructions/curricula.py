"""Which sequence length comes at which step, with as many tokens in each.

H. Pouransari et al., Dataset decomposition: faster LLM training with variable sequence length
curriculum (2024), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

import numpy as np

from megablocks_core.data.checks import row, several, whole_number
from megablocks_core.data.permutation import GOLDEN, WORD, mix

NATURAL, LINEAR, POWERS = "natural", "grow-linear", "grow-p2"
KINDS = (NATURAL, LINEAR, POWERS)


def length_curriculum(
    kind: str, steps: Mapping[int, int], *, seed: int, cycles: int = 1
) -> np.ndarray:
    """Give a sequence length to each step, so that each length comes at as many as ``steps`` says.

    At each step a length is drawn of those that are left, shorter and longer ones with odds that
    ``kind`` says:

    - ``"natural"``: as much as is left of each, so that all orders are equally likely;
    - ``"grow-linear"``: of n lengths, n for the shortest, one less for each longer one;
    - ``"grow-p2"``: 2**(n - 1) for the shortest, half of that for each longer one.

    So with the last two the short ones come early, are used up, and the long ones remain. With
    ``cycles`` the steps are shared out and it is done so many times over. What is drawn at a step
    is a hash of ``seed`` and its number.

    Shapes: [sum of steps] int64. Sends nothing.

    Raises:
        ValueError: An unknown kind, lengths below 1, a negative number of steps, none at all.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
    if not isinstance(steps, Mapping):
        raise ValueError(f"steps={steps!r} must be numbers of steps by length")
    given = {
        whole_number("steps: length", length, 1): whole_number("steps: number", number, 0)
        for length, number in steps.items()
    }
    lengths = sorted(given)
    if not sum(given.values()):
        raise ValueError(f"steps={steps!r} must hold at least one step")
    seed, cycles = whole_number("seed", seed, 0, WORD), whole_number("cycles", cycles, 1)
    odds = {
        LINEAR: [len(lengths) - place for place in range(len(lengths))],
        POWERS: [1 << (len(lengths) - 1 - place) for place in range(len(lengths))],
    }.get(kind)
    drawn: list[int] = []
    for cycle in range(cycles):
        left = [
            given[length] * (cycle + 1) // cycles - given[length] * cycle // cycles
            for length in lengths
        ]
        while any(left):
            weights = left
            if odds:
                weights = [odd if rest else 0 for odd, rest in zip(odds, left, strict=True)]
            place = _drawn(weights, mix(mix(seed ^ GOLDEN) ^ len(drawn)))
            left[place] -= 1
            drawn.append(lengths[place])
    return np.array(drawn, np.int64)


def length_stages(lengths: Iterable[int], *, global_batch_size: int) -> list[tuple[int, int]]:
    """Return the lengths of steps as a ``Loader`` takes them for its ``sequence_length``.

    That is pairs (from this sample on, this length), for steps of ``global_batch_size`` samples.
    Each length must divide that of the dataset; a step has as many tokens at any.
    """
    size = whole_number("global_batch_size", global_batch_size, 1)
    given = row("lengths", list(several("lengths", lengths))).tolist()
    stages, step = [], 0
    for length, run in groupby(given):
        stages.append((step * size, whole_number("lengths", length, 1)))
        step += len(list(run))
    return stages


def _drawn(weights: list[int], word: int) -> int:
    """The place that 64 random bits choose, in proportion to weights."""
    target = word * sum(weights) >> 64
    for place, weight in enumerate(weights):
        if target < weight:
            return place
        target -= weight
    raise AssertionError
