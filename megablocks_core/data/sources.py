"""What a blend needs of its sources, and of all of them together."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from megablocks_core.data.place import Place


class Source(Protocol):
    """What a blend needs of a dataset; ``GPTDataset`` and ``BlendedDataset`` have it."""

    sequence_length: int

    @property
    def fingerprint(self) -> str:
        """What changes with the order or the tokens."""
        ...

    def __len__(self) -> int: ...

    def batch(self, samples: np.ndarray) -> Mapping[str, Any]:
        """Return some samples as one batch."""
        ...

    def num_loss_tokens(self, samples: np.ndarray) -> int:
        """Return how many labels of some samples count."""
        ...

    def locate(self, sample: int) -> Place:
        """Return where a sample comes from."""
        ...


def checked_sources(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the sources of a blend.

    Raises:
        ValueError: there is none, one is empty or no dataset of samples, or two have another
            length, another tokenizer, or the same shuffle.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise ValueError(f"sources={sources!r} must name at least one dataset")
    for name, source in sources.items():
        if not hasattr(source, "sequence_length") or not hasattr(source, "__len__"):
            raise ValueError(f"source {name!r} must be a dataset of samples, not {source!r}")
        if len(source) == 0:
            raise ValueError(f"source {name!r} is empty, must hold at least one sample")
    lengths = {name: source.sequence_length for name, source in sources.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"sources of sequence_length={lengths} must all be of one")
    tokenizers = tokenizers_of(sources)
    if len(set(tokenizers.values())) > 1:
        raise ValueError(f"sources of {tokenizers=} must all be of one")
    _refuse_equal_shuffles(sources)
    return dict(sources)


def tokenizers_of(sources: Mapping[str, Source]) -> dict[str, str]:
    """Return what names the tokenizer of each source that tells it."""
    told = {name: getattr(source, "tokenizer", None) for name, source in sources.items()}
    return {name: tokenizer for name, tokenizer in told.items() if tokenizer is not None}


def epoch_of(source: Source) -> int:
    """Return the number of samples after which a source repeats itself."""
    return getattr(source, "samples_per_epoch", len(source))


def _refuse_equal_shuffles(sources: Mapping[str, Source]) -> None:
    """Two sources of one size and seed would come in the same order: their windows in step."""
    seen: dict[tuple[Any, int], str] = {}
    for name, source in sources.items():
        if (seed := getattr(source, "seed", None)) is None:
            continue
        key = (seed, epoch_of(source))
        if key in seen:
            raise ValueError(
                f"sources {seen[key]!r} and {name!r}, both with seed={seed} and {key[1]} samples "
                f"an epoch, must have different seeds, or they are shuffled alike"
            )
        seen[key] = name
