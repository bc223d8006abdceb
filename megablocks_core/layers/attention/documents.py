"""Where tokens stand in the documents of a row.

Dimensions: T tokens.
"""

import torch
from torch import Tensor


def document_positions(
    num_tokens: int, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """Each token's place in its document, or in the rest of the row after the last, int64 [T]."""
    places = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).long()
    index_T = torch.arange(num_tokens, device=places.device)
    return index_T - places[torch.searchsorted(places, index_T, right=True) - 1]
