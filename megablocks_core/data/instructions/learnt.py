"""Which tokens of documents are to be predicted: those of the sequences of mode 1.

Without modes, all are. The first token of a document never is: nothing stands before it.
"""

from __future__ import annotations

import numpy as np

from megablocks_core.data.indexed import IndexedDataset


def document_bounds(indexed: IndexedDataset) -> np.ndarray:
    """Where each document begins in all tokens, and the last one ends, [D + 1] int64."""
    ends = np.append(np.asarray(indexed.sequence_pointers), indexed.tokens.nbytes)
    return ends[np.asarray(indexed.document_indices)] // indexed.dtype.itemsize


def refuse_other_modes(indexed: IndexedDataset) -> None:
    """Raise ``ValueError`` where modes say something else."""
    modes = indexed.sequence_modes
    if modes is not None and (wrong := (np.asarray(modes) >> 1) != 0).any():
        at = int(wrong.argmax())
        raise ValueError(
            f"{indexed.prefix}: the mode of sequence {at} is {modes[at]}, must be 1 for what is "
            f"to be learnt or 0"
        )


def loss_counts(indexed: IndexedDataset, kept: np.ndarray) -> np.ndarray:
    """How many of the first ``kept`` tokens [D] of each document are to be predicted, [D]."""
    if indexed.sequence_modes is None:
        return np.maximum(kept - 1, 0)
    firsts = np.asarray(indexed.document_indices)
    document = np.arange(len(kept)).repeat(np.diff(firsts))
    lengths = np.asarray(indexed.sequence_lengths, np.int64)
    stops = np.cumsum(lengths)
    bounds = document_bounds(indexed)
    base = bounds[document] - bounds[:1]
    begins, ends = stops - lengths - base, stops - base
    inside = np.minimum(ends, kept[document]) - np.maximum(begins, 1)
    counted = np.maximum(inside, 0) * (np.asarray(indexed.sequence_modes) == 1)
    total = np.zeros(len(kept), np.int64)
    np.add.at(total, document, counted)
    return total


def masks(indexed: IndexedDataset, documents: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Of the first ``kept`` tokens of some documents, end to end, which are to be predicted.

    The first of each counts as one of the document's, whatever precedes it.
    """
    if indexed.sequence_modes is None:
        return np.ones(int(kept.sum()), np.float32)
    firsts, lasts = (indexed.document_indices[documents + end] for end in (0, 1))
    sequences = ranges(firsts, lasts - firsts)
    lengths = np.asarray(indexed.sequence_lengths[sequences], np.int64)
    whole = np.asarray(indexed.sequence_modes[sequences], np.float32).repeat(lengths)
    stops = np.cumsum(lengths)[np.cumsum(lasts - firsts) - 1]
    starts = np.concatenate([[0], stops[:-1]])
    return whole[ranges(starts, kept)]


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``start`` to ``start + length``, for each, one after another."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + (starts - before).repeat(lengths)
