"""Where the places of each expert lie among all places.

Dimensions: N places, e experts here, C places an expert.
"""

from itertools import accumulate

from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.dispatch.host_read import read_counts


def host_counts(dispatched: Dispatched) -> list[int]:
    """How many places each expert fills, as integers; read from the device if they have to be."""
    if dispatched.host_counts is not None:
        return dispatched.host_counts
    return read_counts(dispatched.tokens_per_expert)


def starts_of(dispatched: Dispatched, counts: list[int]) -> list[int]:
    """The first place of each expert."""
    if dispatched.capacity is not None:
        return [expert * dispatched.capacity for expert in range(len(counts))]
    return [0, *accumulate(counts)][: len(counts)]
