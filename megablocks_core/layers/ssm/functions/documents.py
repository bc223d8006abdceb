"""Documents packed into one row, told from ``cu_seqlens`` without reading a value on the host.

Dimensions: L tokens, E documents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks_core.parallel.sequence import check_cu_seqlens


def check_documents(cu_seqlens: Tensor | None, *, rows: int, length: int) -> None:
    """Refuse sums of lengths that do not describe one row of ``length`` tokens.

    Raises:
        ValueError: There is more than one row, or see ``check_cu_seqlens``.
    """
    check_cu_seqlens(cu_seqlens, length)
    if cu_seqlens is not None and rows != 1:
        raise ValueError(f"cu_seqlens must come with one row of tokens, not {rows}")


def document_of_token(cu_seqlens: Tensor, length: int) -> Tensor:
    """The number of each token's document, int64 [L]; tokens behind the last one have E."""
    index_L = torch.arange(length, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.long(), index_L, right=True) - 1
