"""What datasets of numbered samples share, whatever a sample is made of."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from megablocks_core.data.checks import row, whole_number
from megablocks_core.data.collate import PER_TOKEN
from megablocks_core.data.gather import gather_tokens, gather_tokens_numpy
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.permutation import WORD
from megablocks_core.data.split import Split


class Samples(ABC):
    """Samples by number, each with its tokens, labels, loss mask, positions and documents."""

    _length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        batch = self.batch([sample])
        return {name: batch[name][0] for name in PER_TOKEN} | {"cu_seqlens": batch["cu_seqlens"]}

    @abstractmethod
    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Return samples laid end to end, as ``GPTDataset.batch`` does."""

    def _checked(self, samples: Sequence[int] | np.ndarray) -> np.ndarray:
        """Numbers of samples that there are [B], an array of its own.

        Raises:
            IndexError: There is no such sample.
        """
        wanted = row("samples", samples)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {len(self)}")
        return wanted


class IndexedSamples(Samples):
    """Samples of documents of one indexed dataset.

    Attributes:
        indexed: The dataset.
        seed: Of all that is drawn.
        split: Which of its documents samples are of.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        seed: int,
        split: Split | None,
        of: int = 1,
    ) -> None:
        """Check the arguments; the numbers of a split count documents, or groups ``of`` some."""
        if not isinstance(indexed, IndexedDataset):
            raise ValueError(f"indexed={indexed!r} must be an IndexedDataset")
        if indexed.dtype.kind not in "iu":
            raise ValueError(f"indexed.dtype={indexed.dtype.name} must be an integer type")
        self.indexed = indexed
        self.seed = whole_number("seed", seed, 0, WORD)
        self.split = Split("all", range(indexed.num_documents // of)) if split is None else split
        if not isinstance(self.split, Split):
            raise ValueError(f"split={split!r} must be a Split, such as one of split_documents()")

    @property
    def tokenizer(self) -> str | None:
        """What names the tokenizer of the tokens, where a builder recorded it."""
        return self.indexed.manifest.tokenizer if self.indexed.manifest else None

    def resized(self, num_samples: int) -> Self:
        """Return the same samples in the same order, but as many as this."""
        other = copy.copy(self)
        other._length = whole_number("num_samples", num_samples, 1)
        return other

    def _read(
        self, starts: np.ndarray, lengths: np.ndarray, *, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Ranges of the dataset's tokens, one behind the other, as int64."""
        tokens: Any = self.indexed.tokens  # an array, or what reads like one from far away
        gather = gather_tokens if isinstance(tokens, np.ndarray) else gather_tokens_numpy
        found = np.empty(int(lengths.sum()), np.int64) if out is None else out
        gather(tokens, starts, lengths, out=found)
        return found
