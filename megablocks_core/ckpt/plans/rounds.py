"""Work of many ranks in rounds, so that no rank holds more than a bucket at once. Pure."""

from __future__ import annotations

import numpy as np

BUCKET_BYTES = 64 * 2**20


class Rounds:
    """Puts each job into the first round, from a given one on, that has room for it.

    In one round the jobs of a rank need at most ``limit`` bytes there, or one of them alone needs
    more. What a rank needs is memory beside the state: messages, and what they are put into.

    Args:
        num_ranks: Number of ranks.
        limit: Bytes of a bucket.
    """

    def __init__(self, num_ranks: int, limit: int = BUCKET_BYTES) -> None:
        self._num_ranks, self._limit = num_ranks, limit
        self._used: list[np.ndarray] = []

    def place(self, ranks: np.ndarray, nbytes: np.ndarray, *, first: int) -> int:
        """The round of a job that needs ``nbytes`` of memory on ``ranks``, each named once."""
        number = first
        while number < len(self._used):
            used = self._used[number][ranks]
            if not ((used > 0) & (used + nbytes > self._limit)).any():
                break
            number += 1
        while len(self._used) <= number:
            self._used.append(np.zeros(self._num_ranks, dtype=np.int64))
        self._used[number][ranks] += nbytes
        return number

    def __len__(self) -> int:
        return len(self._used)
