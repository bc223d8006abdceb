"""Passes over the same things, each in a shuffled order of its own."""

import numpy as np

from megablocks_core.data.permutation import Permutation


class EpochOrder:
    """Place ``k`` of epoch ``e`` is ``Permutation(size, seed=seed, epoch=e)(k)``.

    Places go on from epoch to epoch, and no epoch ends. Nothing is built.
    """

    def __init__(self, size: int, *, seed: int) -> None:
        self.size, self.seed = size, seed
        self._permutation = Permutation(size, seed=seed, epoch=0)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return what stands at places of the shuffled order, both [B] int64."""
        epochs, inside = np.divmod(places, self.size)
        if len(epochs) and epochs.min() == epochs.max():
            return self._permutation_of(int(epochs[0]))(inside)
        found = np.empty_like(inside)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            found[now] = self._permutation_of(epoch)(inside[now])
        return found

    def _permutation_of(self, epoch: int) -> Permutation:
        permutation = self._permutation  # of the last epoch asked for, most often this one
        if permutation.epoch != epoch:
            permutation = Permutation(self.size, seed=self.seed, epoch=epoch)
            self._permutation = permutation
        return permutation
