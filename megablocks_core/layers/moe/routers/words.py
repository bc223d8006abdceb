"""Random values as functions of a word a token, of a stream and of a place."""

import torch
from torch import Tensor

from megablocks_core.parallel.counter import bits_of, key_of, shift


def uniform(index_T: Tensor, key: int, count: int) -> Tensor:
    """Float64 values of [0, 1), ``count`` for each word [T count]."""
    places = torch.arange(count, device=index_T.device)
    bits = bits_of(bits_of(index_T, key).unsqueeze(-1), places)
    return shift(bits, 11).double() * 2.0**-53


def stream_key(stream: str) -> int:
    """The key of a layer's stream.

    Raises:
        ValueError: It is no name.
    """
    if not isinstance(stream, str) or not stream:
        raise ValueError(f"stream={stream!r} must name the layer")
    return key_of(0, f"{stream}.router")


# What torch.compiler.assume_constant_result does, but for its import of the whole compiler.
stream_key._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_words(index: Tensor, num_tokens: int) -> None:
    """Raise unless there is an int64 word for each token."""
    if index.dtype != torch.int64 or tuple(index.shape) != (num_tokens,):
        raise ValueError(
            f"index of {index.dtype} and shape {list(index.shape)} must be int64 of [{num_tokens}]"
        )
