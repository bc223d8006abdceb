"""A shuffle that is computed, not stored.

A Feistel network over a grid whose rows are a power of two long and just hold the range, walked
until it lands inside (less than the last row lies outside, so few places walk): any place of the
shuffled order costs a fixed few steps of integer arithmetic and no memory, and is the same on every
machine. Networks: Luby and Rackoff, SIAM J. Comput. 17 (1988). Walking: Black and Rogaway, CT-RSA
2002, section 3. The mixer is the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
Arrays of places go through the extension (``cpp/permutation.hpp``), without the interpreter lock;
one place, and all of them where there is no extension, through the same few lines of integer
arithmetic.
"""

from typing import Any, overload

import numpy as np

from megablocks_core.data.checks import MOST, whole_number
from megablocks_core.data.extension import native as _native

WORD = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
Words = Any  # one 64-bit number as an int, or an array of uint64: the same code serves both


class Permutation:
    """A bijection of ``range(size)`` chosen by ``(seed, epoch)``.

    ``permutation(i)`` is the element at place ``i`` of the shuffled order: an int for an int,
    an array [any shape] of int64 for an array. A second of its ``threads`` starts at 32,768 places.

    Sends nothing; every rank computes the same order.

    Raises:
        ValueError: ``size`` outside 1 to 2**63, ``seed`` or ``epoch`` outside 0 to 2**64 - 1,
            ``threads`` below 1.
        IndexError: a place outside ``range(size)``.

    Source: see the module.
    """

    def __init__(self, size: int, *, seed: int, epoch: int = 0) -> None:
        size = whole_number("size", size, 1, MOST + 1)
        seed, epoch = whole_number("seed", seed, 0, WORD), whole_number("epoch", epoch, 0, WORD)
        self.size, self.seed, self.epoch = size, seed, epoch
        bits = max(2, (size - 1).bit_length())
        self._low_bits = bits - bits // 2
        self._low = (1 << self._low_bits) - 1
        self._rows = (size + self._low) >> self._low_bits
        key = 0
        for word in (seed, epoch, size):
            key = mix((key + GOLDEN & WORD) ^ word)
        # Small ranges have few bits to stir: with 16 rounds the permutations of 5 to 8 elements
        # are measurably not equally likely, with 32 they are.
        rounds = 8 if size >= 1024 else 32
        self._keys = [mix(key + GOLDEN * place & WORD) for place in range(1, rounds + 1)]
        self._key_words = np.array(self._keys, np.uint64)

    @overload
    def __call__(self, place: int, *, threads: int = 1) -> int: ...
    @overload
    def __call__(self, place: np.ndarray, *, threads: int = 1) -> np.ndarray: ...
    def __call__(self, place: int | np.ndarray, *, threads: int = 1) -> int | np.ndarray:
        """Return what stands at a place of the shuffled order, or at each of many places."""
        threads = whole_number("threads", threads, 1)
        if isinstance(place, np.ndarray):
            return self._shuffle_array(place, threads)
        place = whole_number("place", place)
        if not 0 <= place < self.size:
            raise IndexError(f"place {place} of a permutation of {self.size}")
        value = self._stir(place)
        while value >= self.size:
            value = self._stir(value)
        return value

    def _shuffle_array(self, places: np.ndarray, threads: int) -> np.ndarray:
        if places.dtype.kind not in "iu":
            raise ValueError(f"places of {places.dtype} must be whole numbers")
        least, greatest = int(places.min(initial=0)), int(places.max(initial=0))
        if least < 0 or greatest >= self.size:
            raise IndexError(f"places {least} to {greatest} of a permutation of {self.size}")
        if _native is None:
            return self._shuffle_numpy(places)
        out = np.empty(places.size, np.int64)
        inside = _native.permute(
            np.ascontiguousarray(places.ravel(), np.int64),
            keys=self._key_words,
            low_bits=self._low_bits,
            rows=self._rows,
            size=self.size,
            out=out,
            threads=threads,
        )
        if not inside:  # the caller changed them meanwhile
            raise IndexError(f"a place outside a permutation of {self.size}")
        return out.reshape(places.shape)

    def _shuffle_numpy(self, places: np.ndarray) -> np.ndarray:
        values = self._stir(places.astype(np.uint64).ravel())
        while (outside := np.flatnonzero(values >= self.size)).size:
            values[outside] = self._stir(values[outside])
        return values.astype(np.int64).reshape(places.shape)

    def _stir(self, value: Words) -> Words:
        """Apply the network, a bijection of the grid."""
        high, low = value >> self._low_bits, value & self._low
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            high = (high + ((mix(low ^ even) >> 32) * self._rows >> 32)) % self._rows
            low = low ^ (mix(high ^ odd) & self._low)
        return high << self._low_bits | low


def mix(word: Words) -> Words:
    """Return 64 bits, each of which depends on every bit of the word."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)
