"""The order of samples of Megatron-LM's ``GPTDataset``, exactly, for the same seed and splits.

Dimensions: L sequences of the split, E epochs, T tokens of an epoch, S sequence length, n samples.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megablocks_core.data.checks import MOST, whole_number
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.sample_index import build, count_samples
from megablocks_core.data.split import SequenceSplit, Split, checked_documents
from megablocks_core.data.stream import Parts

LEAST_SEPARATE = 0.80  # an epoch drawn on for less than this share of it is shuffled by itself


@dataclass(frozen=True)
class MegatronOrder:
    """The order of Megatron-LM, with two of its options; ``"megatron"`` means the defaults.

    With ``extra_token`` neighbouring samples share a token and each has S labels; without, the
    last input of each sample has none. Without ``drop_last`` the tokens left at the end are one
    more sample, shorter than the rest; the reference offers that for validation.
    """

    extra_token: bool = True
    drop_last: bool = True

    def __post_init__(self) -> None:
        for name in ("extra_token", "drop_last"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r} must be True or False")


class MegatronIndex:
    """The document, sample and shuffle index of a run of ``num_samples`` (default: one epoch).

    The stream is E epochs of the split's sequences, as many as it takes, all shuffled together;
    so samples may join the end of an epoch to the start of the next. A last epoch of which less
    than 80 % is drawn is shuffled by itself, behind the others. Sample k is the tokens from row
    ``shuffle_index[k]`` of ``sample_index`` on. Another ``num_samples`` may thus be another order.

    Built in memory in about 0.2 us a sequence and epoch; nothing is cached or shared, and it
    pickles as its arguments.

    Shapes: ``document_index`` [E L] int32, the sequences in the order of the stream;
    ``sample_index`` [n + 1, 2] int32, places in it and offsets; ``shuffle_index`` [n] uint32; each
    int64 where it must be. n may be above ``num_samples``.

    Raises:
        ValueError: a split with fewer than 2 tokens or too few for a sample.

    Source: ``GPTDataset`` of https://github.com/NVIDIA/Megatron-LM.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_length: int,
        *,
        seed: int,
        split: Split,
        num_samples: int | None = None,
        order: MegatronOrder = MegatronOrder(),  # noqa: B008  frozen
    ) -> None:
        seed = whole_number("seed", seed, 0, 2**32 - 1)
        self._arguments = (indexed, sequence_length, seed, split, num_samples, order)
        self._indexed, self.sequence_length, self.order = indexed, sequence_length, order
        self._sequences = _sequences_of(indexed, split)
        lengths = _lengths_of(indexed, self._sequences)
        tokens = int(lengths.sum(dtype=np.int64))
        counts = {"extra_token": order.extra_token, "drop_last": order.drop_last}
        self.samples_per_epoch = count_samples(tokens, sequence_length, **counts)
        if tokens < 2 or (num_samples is None and self.samples_per_epoch < 1):
            whole = sequence_length + order.extra_token if order.drop_last else 2
            raise ValueError(
                f"split {split.name!r} of {len(lengths)} sequences holds {tokens} tokens, must "
                f"hold at least {max(2, whole)} for a sample of sequence_length={sequence_length}"
            )
        self.num_epochs, self.shuffled_apart = 1, False
        before = 0  # samples that end before the last epoch
        if num_samples is not None:
            wanted = num_samples * sequence_length + order.extra_token
            if wanted > MOST:
                raise ValueError(f"num_samples={num_samples} must be of at most {MOST} tokens")
            self.num_epochs = max(1, -(-wanted // tokens))
        if num_samples is not None and self.num_epochs > 1:
            earlier = (self.num_epochs - 1) * tokens - order.extra_token
            before = earlier // sequence_length
            each = (tokens - order.extra_token) // sequence_length
            self.shuffled_apart = num_samples - before < int(LEAST_SEPARATE * each)

        # One stream of random numbers for all of it, in the reference's order of drawing.
        state = np.random.RandomState(seed)
        apart = [self.num_epochs - 1, 1] if self.shuffled_apart else [self.num_epochs]
        self._documents = np.concatenate([_shuffled(state, len(lengths), e) for e in apart])
        self.sample_index = build(
            lengths,
            self._documents,
            sequence_length,
            num_tokens=self.num_epochs * tokens,
            **counts,
        )
        self.num_samples = len(self.sample_index) - 1
        ranges = [0, before, self.num_samples] if self.shuffled_apart else [0, self.num_samples]
        dtype = np.uint32 if self.num_samples < 2**32 - 2 else np.int64
        self.shuffle_index = np.arange(self.num_samples, dtype=dtype)
        for first, last in zip(ranges[:-1], ranges[1:], strict=True):
            state.shuffle(self.shuffle_index[first:last])
        self._lengths, self._owners = lengths, _owners(indexed)

    @property
    def document_index(self) -> np.ndarray:
        """The numbers of the sequences, in the order of the stream."""
        return self._numbers(self._documents).astype(self._documents.dtype, copy=False)

    @property
    def facts(self) -> list[Any]:
        """What tells this order from others of the same dataset, seed and sequence length."""
        options = [self.order.extra_token, self.order.drop_last]
        return ["megatron", *options, self.num_epochs, self.shuffled_apart, len(self._lengths)]

    def parts(self, samples: np.ndarray) -> Parts:
        """Return the tokens of each sample, S and with ``extra_token`` one more, as parts."""
        rows = self.shuffle_index[samples].astype(np.int64)
        begin, end = (self.sample_index[each].astype(np.int64) for each in (rows, rows + 1))
        counts = end[:, 0] - begin[:, 0] + 1
        windows = np.arange(len(rows)).repeat(counts)
        first, last = counts.cumsum() - counts, counts.cumsum() - 1
        relative = self._documents[
            np.arange(len(windows)) + (begin[:, 0] - first).repeat(counts)
        ].astype(np.int64)
        offsets, stops = np.zeros(len(windows), np.int64), self._lengths[relative].astype(np.int64)
        offsets[first] = begin[:, 1]
        stops[last] = end[:, 1] + self.order.extra_token
        lengths = stops - offsets
        if lengths.min(initial=1) < 1:  # empty sequences have no part
            full = lengths > 0
            windows, relative = windows[full], relative[full]
            offsets, lengths = offsets[full], lengths[full]
        ends = lengths.cumsum()
        opens = np.ones(len(windows), bool)
        opens[1:] = windows[1:] != windows[:-1]
        before = (ends - lengths)[opens]
        columns = ends - lengths - before.repeat(np.bincount(windows))
        sequences = self._numbers(relative)
        pointers = self._indexed.sequence_pointers[sequences] // self._indexed.dtype.itemsize
        documents, within = sequences, offsets
        if self._owners is not None:
            documents = self._owners.searchsorted(sequences, side="right") - 1
            opening = self._indexed.sequence_pointers[self._owners[documents]]
            within = offsets + pointers - opening // self._indexed.dtype.itemsize
        return Parts(windows, columns, documents, within, pointers + offsets, lengths)

    def _numbers(self, relative: np.ndarray) -> np.ndarray:
        """Return which sequences of the dataset these of the split are."""
        sequences = self._sequences
        if isinstance(sequences, range):
            return relative + sequences.start if sequences.start else relative
        return sequences[relative]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _rebuild, self._arguments


def _rebuild(
    indexed: IndexedDataset,
    sequence_length: int,
    seed: int,
    split: Split,
    num_samples: int | None,
    order: MegatronOrder,
) -> MegatronIndex:
    return MegatronIndex(
        indexed, sequence_length, seed=seed, split=split, num_samples=num_samples, order=order
    )


def _sequences_of(indexed: IndexedDataset, split: Split) -> range | np.ndarray:
    """Return the sequences of a split, in file order."""
    of_sequences = isinstance(split, SequenceSplit)
    numbers = checked_documents(split, len(indexed) if of_sequences else indexed.num_documents)
    if of_sequences:
        return numbers
    if isinstance(numbers, range):
        bounds = indexed.document_indices
        return range(int(bounds[numbers.start]), int(bounds[numbers.stop]))
    firsts = indexed.document_indices[numbers]
    counts = indexed.document_indices[numbers + 1] - firsts
    return np.arange(counts.sum()) + (firsts - counts.cumsum() + counts).repeat(counts)


def _lengths_of(indexed: IndexedDataset, sequences: range | np.ndarray) -> np.ndarray:
    """Return the lengths of some sequences as a copy, since those in the file lie unaligned."""
    if isinstance(sequences, range):
        return np.array(indexed.sequence_lengths[sequences.start : sequences.stop], np.int32)
    return indexed.sequence_lengths[sequences].astype(np.int32)


def _shuffled(state: np.random.RandomState, length: int, epochs: int) -> np.ndarray:
    """Return some epochs of the split, shuffled together."""
    index = np.tile(np.arange(length, dtype=np.int32 if length < 2**31 else np.int64), epochs)
    state.shuffle(index)
    return index


def _owners(indexed: IndexedDataset) -> np.ndarray | None:
    """Return at which sequence each document begins; ``None`` where each is one sequence."""
    bounds = np.array(indexed.document_indices, np.int64)
    return None if np.array_equal(bounds, np.arange(len(indexed) + 1)) else bounds
