"""Tokens laid out in chunks: rows padded at their end, or documents that each start a chunk.

No value is read on the host: E documents of L tokens get ``ceil(L / Q) + E + 1`` chunks, as many
as they can need.

Dimensions: B rows, L tokens, E documents, Q tokens of a chunk, n chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Documents(NamedTuple):
    """Where the documents of one row stand, in chunks.

    Attributes:
        token: The token at each place [n Q].
        filled: Whether there is one [n Q].
        place: The place of each token [L].
        first: Whether a chunk starts a document [n].
        document: The document of each chunk [n]; E for tokens behind the last one.
        last: The last chunk of each document [E]; meaningless for an empty one.
        empty: Whether a document has no token [E].
    """

    token: Tensor
    filled: Tensor
    place: Tensor
    first: Tensor
    document: Tensor
    last: Tensor
    empty: Tensor


def lay_out(cu_seqlens: Tensor, *, length: int, chunk_size: int) -> Documents:
    """The layout of documents [E+1]; tokens behind the last are a further one."""
    device = cu_seqlens.device
    bounds_E = torch.cat((cu_seqlens.long(), torch.tensor([length], device=device)))
    chunks_E = -(bounds_E.diff() // -chunk_size)
    stops_E = chunks_E.cumsum(0)
    starts_E = stops_E - chunks_E
    count = -(length // -chunk_size) + len(chunks_E)
    chunk_n = torch.arange(count, device=device)
    document_n = torch.searchsorted(stops_E, chunk_n, right=True)
    used_n = document_n < len(chunks_E)
    document_n = document_n.clamp(max=len(chunks_E) - 1)
    offset_n = chunk_n - starts_E[document_n]
    within_Q = torch.arange(chunk_size, device=device)
    token_nQ = (bounds_E[document_n] + offset_n * chunk_size)[:, None] + within_Q
    filled_nQ = used_n[:, None] & (token_nQ < bounds_E[document_n + 1][:, None])
    index_L = torch.arange(length, device=device)
    owner_L = torch.searchsorted(bounds_E[1:], index_L, right=True)
    return Documents(
        token=token_nQ.clamp(max=max(length - 1, 0)).flatten(),
        filled=filled_nQ.flatten(),
        place=starts_E[owner_L] * chunk_size + index_L - bounds_E[owner_L],
        first=used_n & (offset_n == 0),
        document=document_n,
        last=(stops_E - 1)[:-1].clamp(min=0),
        empty=chunks_E[:-1] == 0,
    )


def to_chunks(x: Tensor, chunk_size: int, documents: Documents | None) -> Tensor:
    """From tokens [B L ...] to chunks [B n Q ...], with zeros where there is no token."""
    if documents is None:
        missing = -x.shape[1] % chunk_size if x.shape[1] else chunk_size
        # What is not padded is not copied either.
        padded = pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x
        return padded.unflatten(1, (padded.shape[1] // chunk_size, chunk_size))
    if not x.shape[1]:
        zeros = x.new_zeros(x.shape[0], len(documents.first), chunk_size, *x.shape[2:])
        return zeros + x.sum()  # backward must reach x on a rank without tokens too
    filled = documents.filled.view(1, -1, *(1,) * (x.dim() - 2))
    placed = torch.where(filled, x.index_select(1, documents.token), 0)
    return placed.unflatten(1, (len(documents.first), chunk_size))


def to_tokens(y: Tensor, length: int, documents: Documents | None) -> Tensor:
    """From chunks [B n Q ...] to tokens [B L ...]."""
    flat = y.flatten(1, 2)
    return flat[:, :length] if documents is None else flat.index_select(1, documents.place)
