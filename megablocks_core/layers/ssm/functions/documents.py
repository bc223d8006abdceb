"""Documents packed into one row, told from ``cu_seqlens`` without reading a value on the host.

Dimensions: L tokens, E documents.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def check_documents(cu_seqlens: Tensor | None, *, rows: int, length: int) -> None:
    """Refuse sums of lengths that do not describe one row of ``length`` tokens.

    Values are looked at where that costs no wait: on the CPU, outside of compilers.

    Raises:
        ValueError: There is more than one row, ``cu_seqlens`` is no vector of integers that
            starts at 0, never falls, and ends at ``length`` or before.
    """
    if cu_seqlens is None:
        return
    if rows != 1:
        raise ValueError(f"cu_seqlens must come with one row of tokens, not {rows}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype.is_floating_point:
        raise ValueError(
            f"cu_seqlens of shape {tuple(cu_seqlens.shape)} and {cu_seqlens.dtype} must be a "
            "vector of at least two integers"
        )
    hidden = torch.compiler.is_compiling() or isinstance(cu_seqlens, FakeTensor)
    if hidden or cu_seqlens.device.type != "cpu":
        return
    if cu_seqlens[0] != 0 or cu_seqlens[-1] > length or (cu_seqlens.diff() < 0).any():
        raise ValueError(
            f"cu_seqlens={cu_seqlens.tolist()} must start at 0, never fall, and end within the "
            f"row of {length} tokens"
        )


def document_of_token(cu_seqlens: Tensor, length: int) -> Tensor:
    """The number of each token's document, int64 [L]; tokens behind the last one have E."""
    index_L = torch.arange(length, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.long(), index_L, right=True) - 1


def place_in_document(cu_seqlens: Tensor, length: int) -> Tensor:
    """How many tokens of its document stand before each token, int64 [L]."""
    index_L = torch.arange(length, device=cu_seqlens.device)
    return index_L - cu_seqlens.long()[document_of_token(cu_seqlens, length)]
