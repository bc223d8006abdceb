"""Documents with something in them that is not finite, and how the others are kept from it.

Chunks multiply tokens of several documents, and by zero what belongs to another one; a NaN, or an
infinity, would survive that. So it is taken out before, and NaNs are put where it leads.

Dimensions: L tokens, E documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megablocks_core.layers.ssm.functions.documents import document_of_token
from megablocks_core.layers.ssm.functions.steps import wide


class Spoilt(NamedTuple):
    """What NaNs belong in.

    Attributes:
        tokens: Outputs [L].
        documents: States behind documents [E].
    """

    tokens: Tensor
    documents: Tensor

    def put(self, y: Tensor, final: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Outputs [1 L ...] and states [E ...] with them."""
        y = _filled(y, self.tokens, 1, torch.nan)
        return y, None if final is None else _filled(final, self.documents, 0, torch.nan)


def find(
    tensors: Sequence[Tensor], cu_seqlens: Tensor, states: Tensor | None, carry: Tensor | None
) -> Spoilt | None:
    """What is spoilt; ``None`` if that is nothing, and can be told without a wait.

    Args:
        tensors: Of the tokens of one row [1 L ...].
        cu_seqlens: Sums of the documents' lengths.
        states: Those before the documents [E ...].
        carry: The one before the row.
    """
    length, count = tensors[0].shape[1], len(cu_seqlens) - 1
    bad_L = bad_tokens(tensors)
    document_L = document_of_token(cu_seqlens, length)
    begun = bad_L.new_zeros(count + 1)  # what lies behind the last document starts from nothing
    if states is not None:
        begun = torch.cat((_bad(states), begun[:1]))
    if carry is not None:
        first = document_of_token(cu_seqlens, 1)
        begun = begun | (torch.arange(count + 1, device=begun.device) == first) & _bad(carry)
    if _none_for_sure(bad_L) and _none_for_sure(begun):
        return None
    so_far_L = bad_L.cumsum(0)
    before_L = (so_far_L - bad_L.long())[cu_seqlens.long()[document_L]]
    tokens = (so_far_L > before_L) | begun[document_L]
    inside = torch.zeros_like(begun, dtype=torch.long).index_add(0, document_L, bad_L.long()) > 0
    return Spoilt(tokens, (inside | begun)[:-1])


def bad_tokens(tensors: Sequence[Tensor]) -> Tensor:
    """Whether each token has something that is not finite [L]."""
    return torch.stack([_bad(x[0]) for x in tensors]).any(0)


def without_bad_tokens(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Zeros in place of tokens [1 L ...] that have something that is not finite."""
    bad_L = bad_tokens(tensors)
    if _none_for_sure(bad_L):
        return tuple(tensors)
    return tuple(_filled(x, bad_L, 1, 0.0) for x in tensors)


def without_bad_states(states: Tensor | None) -> Tensor | None:
    """Zeros in place of states [E ...] that are not finite."""
    return None if states is None else _filled(states, _bad(states), 0, 0.0)


def _bad(x: Tensor) -> Tensor:
    """For each entry of the first dimension, whether it has something that is not finite."""
    return ~x.detach().flatten(1).sum(1, dtype=wide(x)).isfinite()


def _none_for_sure(bad: Tensor) -> bool:
    """Whether none is bad, where that is told without a wait: on the CPU, outside of compilers."""
    hidden = torch.compiler.is_compiling() or isinstance(bad, FakeTensor) or not bad.is_cpu
    return not hidden and not bad.any()


def _filled(x: Tensor, where: Tensor, dim: int, value: float) -> Tensor:
    return x.masked_fill(where.view(-1, *(1,) * (x.dim() - dim - 1)), value)
