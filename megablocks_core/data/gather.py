"""Gathers ranges of a token array into one int64 array, such as a batch of samples.

Dimensions: N tokens, R ranges. The extension does it in C++ (``cpp/gather.hpp``), without the
interpreter lock and on several threads; ``gather_tokens_numpy`` is its plain twin, which also
serves where the package was installed without a compiler.
"""

import numpy as np
from numpy.typing import NDArray

from megablocks_core.data.checks import whole_number
from megablocks_core.data.extension import native as _native

TOKEN_DTYPES = tuple(map(np.dtype, ("uint8", "int8", "uint16", "int16", "int32", "int64")))


def gather_tokens(
    tokens: NDArray[np.integer],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    out: NDArray[np.int64],
    threads: int = 1,
) -> None:
    """Write ``tokens[starts[i] : starts[i] + lengths[i]]``, one range after another, into ``out``.

    ``tokens`` [N] may be a read-only memory map; ``starts`` and ``lengths`` are [R]; ``out``
    [lengths.sum()] is contiguous and shares no memory with ``tokens``. A batch [B S] is passed as
    ``out.reshape(-1)``. Every range is checked before the first token is read, so an error leaves
    ``out`` as it was. A second thread starts at 2,097,152 tokens, where it begins to pay.

    Raises:
        ValueError: a range that leaves ``tokens``, an ``out`` that the ranges do not fill exactly,
            an array of another shape, dtype or memory layout, or ``threads`` below 1.
    """
    _check_array("tokens", tokens, TOKEN_DTYPES)
    for name, array in (("starts", starts), ("lengths", lengths), ("out", out)):
        _check_array(name, array, (np.dtype(np.int64),))
    if not out.flags.writeable:
        raise ValueError("out must be writeable")
    threads = whole_number("threads", threads, 1)
    if _native is None:
        gather_tokens_numpy(tokens, starts, lengths, out=out)
    else:
        _native.gather_tokens(tokens, starts, lengths, out=out, threads=threads)


def gather_tokens_numpy(
    tokens: NDArray[np.integer],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    out: NDArray[np.int64],
) -> None:
    """Do the same one range at a time, on one thread."""
    if starts.size != lengths.size:
        raise ValueError(f"starts.size={starts.size} must equal lengths.size={lengths.size}")
    ranges = list(zip(starts.tolist(), lengths.tolist(), strict=True))
    for i, (start, length) in enumerate(ranges):
        if start < 0 or length < 0 or start + length > tokens.size:
            raise ValueError(
                f"starts[{i}]={start} and lengths[{i}]={length} "
                f"must lie within {tokens.size} tokens"
            )
    if sum(length for _, length in ranges) != out.size:
        raise ValueError(f"out.size={out.size} must be the sum of lengths")
    target = 0
    for start, length in ranges:
        out[target : target + length] = tokens[start : start + length]
        target += length


def _check_array(name: str, array: np.ndarray, dtypes: tuple[np.dtype, ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} of {type(array)} must be a NumPy array")
    if array.dtype not in dtypes:
        raise ValueError(f"{name}.dtype={array.dtype} must be {' or '.join(map(str, dtypes))}")
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(f"{name} of shape {array.shape} must be one contiguous, aligned row")
