"""Stochastic rounding to 16 bits by counter: up or down by chance, so that the mean is kept.

A value between two 16-bit neighbours goes to the nearer one with the greater probability, each
with that of its nearness (Gupta et al., https://arxiv.org/abs/1502.02551, section 3.1). Chance is
a hash of (seed, step, logical name, index in the whole tensor), so every rank that holds an
element rounds it alike, at any cut.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from megablocks_core.groups import ShardSpec, whole_shape
from megablocks_core.groups.cuts import held_ranges
from megablocks_core.parallel.counter import as_word, bits_of, key_of, shift

# Temporary memory is a few blocks: one that fits a CPU's cache, or that fills a GPU.
_BLOCK_ON_CPU = 1 << 16
_BLOCK_ELSEWHERE = 1 << 22


class Rounding:
    """Rounds elements of one parameter, step after step.

    Args:
        name: Its logical name.
        local_shape: The shape of this rank's share.
        specs: The cuts that made it.
        seed: Of the run.
    """

    def __init__(
        self, name: str, local_shape: tuple[int, ...], specs: Sequence[ShardSpec], *, seed: int
    ) -> None:
        self._key, self._shape, self._specs = key_of(seed, name), local_shape, tuple(specs)

    def round_(self, target: Tensor, source: Tensor, *, start: int, step: int) -> None:
        """Fill 16-bit ``target`` [n] from float32 ``source`` [n], elements from ``start`` on."""
        block = _BLOCK_ON_CPU if target.device.type == "cpu" else _BLOCK_ELSEWHERE
        key = bits_of(as_word(self._key, target.device), as_word(step, target.device))
        for low in range(0, len(target), block):
            values = source[low : low + block]
            places = torch.arange(len(values), device=target.device).add_(start + low)
            chance = bits_of(key, logical_index(places, self._shape, self._specs))
            target[low : low + block] = round_by_chance(values, chance, target.dtype)


def round_by_chance(x: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 ``x`` to 16-bit ``dtype`` by 64 random ``bits`` each.

    The probability is exact to 2**-24. What ``dtype`` has, infinities and NaN stay.
    """
    near = x.to(dtype)
    error = x - near.float()
    # Neighbours in value are neighbours as integers, sign apart: further from zero is one more.
    away = (error > 0) == ~near.signbit()
    other = (near.view(torch.int16) + torch.where(away, 1, -1).short()).view(dtype)
    probability = error / (other.float() - near.float())
    chance = shift(bits, 40).float().mul_(2.0**-24)
    return torch.where((error != 0) & (chance < probability), other, near)


def logical_index(
    places: Tensor, local_shape: tuple[int, ...], specs: Sequence[ShardSpec]
) -> Tensor:
    """Where elements of this rank's flattened share stand in the whole flattened tensor."""
    shape = whole_shape(local_shape, tuple(specs))
    index, stride = torch.zeros_like(places), 1
    rows = zip(local_shape, shape, held_ranges(shape, tuple(specs)), strict=True)
    for length, whole_length, ranges in reversed(list(rows)):
        along, places = places % length, places // length
        if length < whole_length:
            parts = [torch.arange(r.start, r.stop, device=places.device) for r in ranges]
            along = torch.cat(parts)[along]
        index, stride = index.add_(along.mul_(stride)), stride * whole_length
    assert stride == prod(shape)
    return index
