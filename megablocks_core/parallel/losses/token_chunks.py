"""Tokens in chunks, of which all ranks of a group work on the same at a time.

Dimensions: S tokens of a sequence; N tokens of all sequences, n those of a chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import Group, chunk_slice


class Chunk(NamedTuple):
    """Some tokens, those of the first rank first.

    Attributes:
        own: Which of this rank's tokens take part, by their place among its own.
        sizes: How many tokens each rank brings; one number if all ranks hold all tokens.
        places: Where the tokens stand among all N.
    """

    own: Tensor
    sizes: list[int]
    places: Tensor


def chunk_tokens(counts: Tensor, length: int, *, cut: Group) -> list[Chunk]:
    """The tokens that count, in chunks of at most ``length``; the host waits for their number.

    Args:
        counts: Whether a token takes part [... S], equal on every rank.
        length: Tokens in a chunk; at least one of every rank that has some left.
        cut: The ranks over which S is cut, by ``torch.chunk``'s rule; else ``LOCAL``.
    """
    places = torch.arange(counts.numel(), device=counts.device)
    shares = [places]
    if cut.size > 1:
        cuts = (chunk_slice(counts.shape[-1], cut.size, rank) for rank in range(cut.size))
        shares = [places.view(counts.shape)[..., part].reshape(-1) for part in cuts]
    kept = [counts.reshape(-1)[share].nonzero().squeeze(-1) for share in shares]
    step = max(1, length // cut.size)
    chunks = []
    for start in range(0, max(map(len, kept)), step):
        rows = [tokens[start : start + step] for tokens in kept]
        whole = torch.cat([share[part] for share, part in zip(shares, rows, strict=True)])
        chunks.append(Chunk(rows[cut.rank], [len(part) for part in rows], whole))
    return chunks
