"""Megatron-LM's sample index: where each sample of a stream of shuffled documents begins.

Dimensions: L documents of the dataset, D places of the stream, N tokens of it, S sequence length,
n samples.
"""

import numpy as np
from numpy.typing import NDArray

from megablocks_core.data.checks import whole_number
from megablocks_core.data.extension import native as _native

LARGEST = 2**31 - 1


def count_samples(
    num_tokens: int, sequence_length: int, *, extra_token: bool = True, drop_last: bool = True
) -> int:
    """Return how many samples a stream of ``num_tokens`` holds, in whole numbers of any size.

    Neighbouring samples share a token with ``extra_token``, so that each has S inputs and S labels.
    Without ``drop_last`` tokens left at the end are one more sample, shorter than the rest.
    """
    tokens = max(num_tokens - extra_token, 0)
    return tokens // sequence_length if drop_last else -(-tokens // sequence_length)


def build(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.integer],
    sequence_length: int,
    *,
    num_tokens: int,
    extra_token: bool = True,
    drop_last: bool = True,
    threads: int = 1,
) -> NDArray[np.integer]:
    """Return [n + 1, 2]: the place in the stream and the offset there at which each sample begins.

    ``document_index`` [D] int32 or int64 lists the documents of the stream, ``lengths`` [L] int32
    their tokens; ``num_tokens`` is N, the sum of their lengths. Sample j takes S tokens, and one
    more with ``extra_token``, from row j on: to row j + 1, or to one token past it. A row points
    into the document that holds the last token of the sample before, so never to an empty one
    while it has an extra token to share. int32 where places and lengths fit, otherwise int64.

    The twin of the C++, with the same bits, is ``build_numpy``. A second thread starts at
    1,048,576 documents.

    Raises:
        ValueError: an array of another dtype or layout, a document or length out of range,
            ``num_tokens`` that are not those of the stream, a ``sequence_length`` outside 1 to
            2**31 - 1.

    Source: ``build_sample_idx`` of Megatron-LM; the count of a last short sample, which it takes
    from single-precision division, is exact here.
    """
    _check(lengths, document_index, sequence_length, threads)
    if _native is None:
        return build_numpy(
            lengths,
            document_index,
            sequence_length,
            num_tokens=num_tokens,
            extra_token=extra_token,
            drop_last=drop_last,
        )
    num_samples = count_samples(
        num_tokens, sequence_length, extra_token=extra_token, drop_last=drop_last
    )
    out = np.empty((num_samples + 1, 2), _dtype(document_index))
    _native.build_sample_index(
        lengths,
        document_index,
        sequence_length=sequence_length,
        extra=int(extra_token),
        num_tokens=num_tokens,
        out=out,
        threads=threads,
    )
    return out


def build_numpy(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.integer],
    sequence_length: int,
    *,
    num_tokens: int,
    extra_token: bool = True,
    drop_last: bool = True,
) -> NDArray[np.integer]:
    """Do the same by a running sum and a binary search in it."""
    _check_documents(lengths, document_index)
    taken = lengths[document_index].astype(np.int64)
    ends = taken.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    if total != num_tokens:
        raise ValueError(
            f"num_tokens={num_tokens} must be the {total} tokens of the documents in document_index"
        )
    num_samples = count_samples(
        num_tokens, sequence_length, extra_token=extra_token, drop_last=drop_last
    )
    index = np.zeros((num_samples + 1, 2), _dtype(document_index))
    last_tokens = np.arange(1, num_samples + 1) * sequence_length + extra_token
    short = num_samples > 0 and last_tokens[-1] > num_tokens
    places = ends.searchsorted(last_tokens[:-1] if short else last_tokens)
    begins = ends[places] - taken[places]
    index[1 : len(places) + 1, 0] = places
    index[1 : len(places) + 1, 1] = last_tokens[: len(places)] - extra_token - begins
    if short:  # it ends with the stream
        place = ends.searchsorted(total) if extra_token else len(ends) - 1
        index[-1] = place, taken[place] - extra_token
    return index


def _dtype(document_index: np.ndarray) -> type[np.integer]:
    return np.int32 if len(document_index) <= LARGEST else np.int64


def _check(
    lengths: np.ndarray, document_index: np.ndarray, sequence_length: int, threads: int
) -> None:
    whole_number("sequence_length", sequence_length, 1, LARGEST)
    whole_number("threads", threads, 1)
    for name, array, dtypes in (
        ("lengths", lengths, ("int32",)),
        ("document_index", document_index, ("int32", "int64")),
    ):
        if array.dtype not in dtypes:
            raise ValueError(f"{name}.dtype={array.dtype} must be {' or '.join(dtypes)}")
        if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.aligned:
            raise ValueError(f"{name} of shape {array.shape} must be one contiguous, aligned row")


def _check_documents(lengths: np.ndarray, document_index: np.ndarray) -> None:
    outside = (document_index < 0) | (document_index >= len(lengths))
    if outside.any():
        place = int(outside.argmax())
        raise ValueError(
            f"document_index[{place}]={document_index[place]} must be one of "
            f"{len(lengths)} documents"
        )
    negative = lengths[document_index] < 0
    if negative.any():
        document = document_index[negative.argmax()]
        raise ValueError(f"lengths[{document}]={lengths[document]} must be 0 or more")
