"""Cuts the documents of a dataset into training, validation and test sets."""

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite
from typing import NamedTuple

import numpy as np

from megablocks_core.data.checks import different_names, several, whole_number


class Split(NamedTuple):
    """Named documents of a dataset, in increasing order.

    ``documents`` is a range, which costs nothing whatever its size, or an array [D] int64 of
    document numbers. ``offsets`` [D + 1] int64 may hold where each of an array's documents begins
    in the stream of them all, ending with its length; without it a reader adds up the lengths.
    """

    name: str
    documents: range | np.ndarray
    offsets: np.ndarray | None = None


class SequenceSplit(Split):
    """A split whose numbers are those of sequences instead of documents."""


def checked_documents(split: Split, num_documents: int) -> range | np.ndarray:
    """Return the documents of a split, or sequences of a ``SequenceSplit``, of a dataset.

    Raises:
        ValueError: they are not some of ``num_documents`` in increasing order.
    """
    documents, offsets, name = split.documents, split.offsets, f"split {split.name!r}"
    if isinstance(documents, range):
        if not 0 <= documents.start <= documents.stop <= num_documents:
            raise ValueError(f"split={split} must lie in {num_documents} documents")
        if documents.step != 1:
            raise ValueError(f"split={split} must leave out no document between its ends")
        return documents
    for array, what in ((documents, "documents"), (offsets, "offsets")):
        if what == "offsets" and array is None:
            continue
        if not isinstance(array, np.ndarray) or array.dtype != np.int64 or array.ndim != 1:
            raise ValueError(f"{name}: {what} must be one row of int64, or documents a range")
    # Offsets come with documents that were put in order when they were found.
    if offsets is None and not (documents[1:] > documents[:-1]).all():
        raise ValueError(f"{name}: documents must be in increasing order")
    if len(documents) and not 0 <= documents[0] <= documents[-1] < num_documents:
        raise ValueError(f"{name} must lie in {num_documents} documents")
    if offsets is not None and len(offsets) != len(documents) + 1:
        raise ValueError(
            f"{name} of {len(documents)} documents must have one offset more, not {len(offsets)}"
        )
    return documents


def split_documents(
    num_documents: int,
    weights: str | Sequence[float],
    *,
    names: Sequence[str] = ("train", "valid", "test"),
) -> dict[str, Split]:
    """Cut ``range(num_documents)`` into consecutive splits with sizes in proportion to weights.

    The weights, such as ``"969,30,1"``, are divided by their sum and added up, and each bound
    is rounded to a whole document (half to even). The splits never overlap and together hold
    every document; with few documents a split can be empty, which ``GPTDataset`` refuses.

    Shapes: none. Sends nothing.

    Raises:
        ValueError: weights that are not numbers, negative, all zero, or more than the names;
            a negative number of documents; names that are equal.

    Source: the rule of Megatron-LM, which counts sequences; both agree where each document is
    one sequence.
    """
    num_documents, names = whole_number("num_documents", num_documents, 0), different_names(names)
    try:
        given = weights.split(",") if isinstance(weights, str) else several("weights", weights)
        parts = [float(weight) for weight in given]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"weights={weights!r} must be several numbers, or text that joins them by commas"
        ) from None
    if len(parts) > len(names):
        raise ValueError(f"weights={weights!r} must not be more than names={names}")
    whole = sum(parts)
    if min(parts, default=0.0) < 0 or not isfinite(whole) or whole == 0:
        raise ValueError(f"weights={weights!r} must be 0 or more, one above 0, and finite")
    shares = [part / whole for part in parts] + [0.0] * (len(names) - len(parts))
    bounds = [round(bound * num_documents) for bound in accumulate(shares, initial=0.0)]
    return {
        name: Split(name, range(first, last))
        for name, first, last in zip(names, bounds[:-1], bounds[1:], strict=True)
    }


def split_sequences(
    num_sequences: int,
    weights: str | Sequence[float],
    *,
    names: Sequence[str] = ("train", "valid", "test"),
) -> dict[str, Split]:
    """Cut ``range(num_sequences)`` as Megatron-LM does, by the rule of ``split_documents``.

    Only the order ``"megatron"`` takes such a split. Where each document is one sequence, as
    usual, it is the same as ``split_documents``; elsewhere it may cut a document in two.
    """
    splits = split_documents(num_sequences, weights, names=names)
    return {name: SequenceSplit(*split) for name, split in splits.items()}
