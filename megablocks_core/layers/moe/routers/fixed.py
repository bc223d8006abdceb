"""Choices that no weight makes: by a hash of the token, at random, or dealt out evenly.

Hash layers: Roller et al., https://arxiv.org/abs/2106.04426.

Dimensions: T tokens of this rank, E experts, k slots a token.
"""

import torch
from torch import Tensor, nn

from megablocks_core.layers.moe.counting import count_choices
from megablocks_core.layers.moe.routers.scores import check_mask, check_top_k, highest
from megablocks_core.layers.moe.routers.words import check_words, stream_key, uniform
from megablocks_core.layers.moe.routing import NOWHERE, Routing


def random_choices(index_T: Tensor, *, num_experts: int, top_k: int, stream: str) -> Tensor:
    """``top_k`` different experts a token [T k], uniform, by a hash of the token's word.

    The same words and stream give the same experts on any ranks, in any micro-batches and when a
    region is recomputed. As ``choices=`` of a ``TopKRouter`` they balance the load with weights
    as they are.

    Args:
        index_T: A word a token, int64 [T]: from ``DropoutKey.index``, or the token's id.
        num_experts: E.
        top_k: k.
        stream: Name of the layer, or of what the hash is for.

    Raises:
        ValueError: ``top_k`` is not from 1 to E, ``stream`` is "", or words are not int64 [T].
    """
    check_top_k(num_experts, top_k)
    check_words(index_T, index_T.shape[0])
    return highest(uniform(index_T, stream_key(stream), num_experts), top_k)


def balanced_choices(
    num_tokens: int,
    *,
    num_experts: int,
    top_k: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """Experts dealt out in turn [T k]: slot s of token t has expert ``(t k + s) mod E``.

    Raises:
        ValueError: ``top_k`` is not from 1 to E.
    """
    check_top_k(num_experts, top_k)
    slots = torch.arange(num_tokens * top_k, device=device)
    return (slots % num_experts).view(num_tokens, top_k)


class HashRouter(nn.Module):
    """A token goes where a hash of its id says, in each layer elsewhere; weights are 1/k.

    It has no weight: nothing learns, and the load follows the frequency of tokens. With the words
    of ``DropoutKey.index`` in place of ids, experts are random.

    Args:
        num_experts: E.
        top_k: k.
        stream: Name of the layer.

    Raises:
        ValueError: ``top_k`` is not from 1 to E, or ``stream`` is "".
    """

    def __init__(self, *, num_experts: int, top_k: int, stream: str) -> None:
        super().__init__()
        check_top_k(num_experts, top_k)
        stream_key(stream)  # raises if it is no name
        self.num_experts, self.top_k, self.stream = num_experts, top_k, stream

    def forward(
        self, x_TH: Tensor, *, mask: Tensor | None = None, index: Tensor | None = None
    ) -> Routing:
        """Route the tokens.

        Args:
            x_TH: Tokens [T H].
            mask: True for tokens that count [T].
            index: Ids of the tokens, int64 [T].

        Raises:
            ValueError: ``index`` is missing, or is not int64 [T].
        """
        if index is None:
            raise ValueError("index=None must be a word a token")
        check_words(index, x_TH.shape[0])
        choices = random_choices(
            index, num_experts=self.num_experts, top_k=self.top_k, stream=self.stream
        )
        return _even(x_TH, choices, self.num_experts, mask)


class BalancedRouter(nn.Module):
    """Experts are dealt out in turn, whatever the tokens: for benchmarks. Weights are 1/k.

    Args:
        num_experts: E.
        top_k: k.

    Raises:
        ValueError: ``top_k`` is not from 1 to E.
    """

    def __init__(self, *, num_experts: int, top_k: int) -> None:
        super().__init__()
        check_top_k(num_experts, top_k)
        self.num_experts, self.top_k = num_experts, top_k

    def forward(self, x_TH: Tensor, *, mask: Tensor | None = None) -> Routing:
        """Route the tokens [T H]; ``mask`` [T] is true for those that count."""
        choices = balanced_choices(
            x_TH.shape[0], num_experts=self.num_experts, top_k=self.top_k, device=x_TH.device
        )
        return _even(x_TH, choices, self.num_experts, mask)


def _even(x_TH: Tensor, choices: Tensor, num_experts: int, mask: Tensor | None) -> Routing:
    """A routing of equal weights and equal scores."""
    check_mask(mask, x_TH)
    dtype = torch.promote_types(x_TH.dtype, torch.float32)
    logits = torch.zeros(x_TH.shape[0], num_experts, dtype=dtype, device=x_TH.device)
    weights = torch.full(choices.shape, 1 / choices.shape[-1], dtype=dtype, device=x_TH.device)
    scores = torch.full_like(logits, 1 / num_experts)
    if mask is not None:
        out = ~mask[:, None]
        choices = choices.masked_fill(out, NOWHERE)
        weights, scores = weights.masked_fill(out, 0), scores.masked_fill(out, 0)
    return Routing(choices, weights, scores, logits, count_choices(choices, num_experts), mask)
