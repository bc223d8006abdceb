"""Which token is which, for dropout: samples of packed rows, and the tokens of a rank.

Dimensions: T tokens, E documents.
"""

import math

import torch
from torch import Tensor

from megablocks_core.groups import Group


def ids_of_tokens(sample_ids: Tensor | None, tokens_T: Tensor, places: Tensor | None) -> Tensor:
    """Each token's sample, as integers that broadcast with the tokens.

    Args:
        sample_ids: One number a row [...], or a document [E]; default 0, 1, 2, ...
        tokens_T: Ids [... T], for their shape.
        places: Sums of the room of documents in one row, from 0 [E+1]; ``None``: rows are whole.

    Raises:
        ValueError: ``sample_ids`` has another shape.
    """
    shape = tokens_T.shape[:-1] if places is None else (len(places) - 1,)
    if sample_ids is None:
        sample_ids = torch.arange(math.prod(shape), device=tokens_T.device).view(shape)
    if sample_ids.shape != shape:
        raise ValueError(
            f"sample_ids of shape {list(sample_ids.shape)} must have one number for each "
            f"{'row' if places is None else 'document'}, {list(shape)}"
        )
    if places is None:
        return sample_ids.unsqueeze(-1)
    index_T = torch.arange(tokens_T.shape[-1], device=places.device)
    numbers_T = torch.searchsorted(places, index_T, right=True) - 1
    return sample_ids[numbers_T.clamp_(max=len(sample_ids) - 1)]  # Tokens of none: as the last.


def own_tokens(index_T: Tensor | None, *, sequence_parallel: bool, group: Group) -> Tensor | None:
    """The words of the tokens that this rank holds between blocks; T divides evenly."""
    if index_T is None or not sequence_parallel:
        return index_T
    count = index_T.shape[-1] // group.size
    return index_T.narrow(-1, group.rank * count, count)
