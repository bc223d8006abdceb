"""The native order of fixed-length samples: windows of the stream, permuted by arithmetic."""

import numpy as np

from megablocks_core.data.epoch_order import EpochOrder
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.split import Split
from megablocks_core.data.stream import Parts, Stream


class NativeOrder:
    """Sample ``k`` of epoch ``e`` is window ``Permutation(windows, seed=seed, epoch=e)(k)``.

    Window ``w`` is the tokens ``w S`` to ``w S + S`` of the split's stream, both ends included:
    S inputs and the label after the last. Nothing is built, and no epoch ends.

    Raises:
        ValueError: too few tokens for one window (names split, documents and tokens).
    """

    def __init__(
        self, indexed: IndexedDataset, sequence_length: int, *, seed: int, split: Split
    ) -> None:
        self.stream = Stream(indexed, split)
        self.sequence_length = sequence_length
        self.seed = seed
        self.samples_per_epoch = (self.stream.num_tokens - 1) // sequence_length
        if self.samples_per_epoch < 1:
            raise ValueError(
                f"{indexed.prefix}: split {split.name!r} ({_count(split)} of "
                f"{indexed.num_documents}) holds {self.stream.num_tokens} tokens, must hold at "
                f"least {sequence_length + 1} for one sample of sequence_length={sequence_length}"
            )
        self.facts = "native"
        self._windows = EpochOrder(self.samples_per_epoch, seed=seed)

    def parts(self, samples: np.ndarray) -> Parts:
        """Return the S + 1 tokens of each sample, as parts of documents."""
        return self.stream.parts(self.starts(samples), self.sequence_length + 1)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """Return where in the stream each sample begins, [B] int64."""
        return self._windows(samples) * self.sequence_length


def _count(split: Split) -> str:
    documents = split.documents
    if isinstance(documents, range):
        return f"documents {documents.start} to {documents.stop}"
    return f"{len(documents)} documents"
