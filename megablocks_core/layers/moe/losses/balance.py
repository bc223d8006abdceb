"""Losses that pull on a router: for even loads, and for small logits.

Balance: Shazeer et al., https://arxiv.org/abs/1701.06538; in this form Switch Transformers,
https://arxiv.org/abs/2101.03961, section 2.2; over each sequence DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.1.2; over the global batch
https://arxiv.org/abs/2501.11873. Size of logits: ST-MoE, https://arxiv.org/abs/2202.08906,
section 3.2.

Dimensions: T tokens, k slots a token, E experts, B sequences.
"""

from typing import Literal

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, check_group, reduce_from
from megablocks_core.layers.moe.losses.sequences import per_sequence
from megablocks_core.layers.moe.routing import Routing

Reduction = Literal["mean", "sum"]


def load_balance_loss(
    routing: Routing,
    *,
    sequence_length: int | None = None,
    cu_seqlens: Tensor | None = None,
    reduction: Reduction = "mean",
    tokens_per_expert: Tensor | None = None,
    group: Group = LOCAL,
) -> Tensor:
    """``E sum_e f_e p_e`` of one layer: 1 when loads are even, E / k at most when they are not.

    f_e is the share of all choices that fell on expert e, p_e the mean score of e. Gradients flow
    through p alone. Taken over all tokens of ``routing``: those of a micro-batch, or of a whole
    batch if it is the sum of the routings of its micro-batches, and of all ranks of ``group``. Or
    over each sequence, and then the mean over sequences, each by its number of tokens. Tokens
    that the mask leaves out count nowhere; without any token the loss is 0.

    Sent: over ``group`` two all-reduces of E numbers forward (of B E over sequences), and nothing
    backward. The value is that of all ranks' tokens, and the gradient that of this rank's part in
    it: summed over the ranks, gradients are those of one process.

    Args:
        routing: Of one layer.
        sequence_length: Tokens of each sequence, which lie one after another.
        cu_seqlens: Where sequences of any lengths begin and end [B + 1].
        reduction: "mean" as above; "sum" that times the number of tokens, to be divided by a
            global count.
        tokens_per_expert: Choices to take for f in place of the routing's own [E], such as those
            of a first pass over the whole batch, where each micro-batch has its own backward. Of
            all ranks already.
        group: Ranks that hold other tokens of the same batch; of the same sequences, if the loss
            is taken over each: then lengths are those of the parts here.

    Raises:
        ValueError: Arguments that do not go together, or lengths that do not fit the tokens.
    """
    check_group(group)
    by_sequence = sequence_length is not None or cu_seqlens is not None
    _check(routing, by_sequence, reduction, tokens_per_expert)
    if by_sequence:
        scores_BE, choices_BE, tokens_B = per_sequence(
            routing, sequence_length=sequence_length, cu_seqlens=cu_seqlens
        )
    else:
        scores_BE = routing.scores.sum(0, keepdim=True)
        choices_BE = routing.tokens_per_expert.unsqueeze(0)
        tokens_B = routing.num_tokens.reshape(1)
    if group.size > 1:
        scores_BE = reduce_from(scores_BE, group=group)
        counts = torch.cat([choices_BE, tokens_B.unsqueeze(1)], dim=1).to(torch.int64)
        counts = group.all_reduce(counts)
        choices_BE, tokens_B = counts[:, :-1], counts[:, -1]
    if tokens_per_expert is not None:
        choices_BE = tokens_per_expert.unsqueeze(0)
    # A quotient of integers would be float32.
    f_BE = choices_BE.to(scores_BE.dtype) / choices_BE.sum(-1, keepdim=True).clamp(min=1)
    # A sequence's mean score times its number of tokens is its sum of scores.
    total = routing.num_experts * (f_BE * scores_BE).sum()
    return total if reduction == "sum" else total / tokens_B.sum().clamp(min=1)


def z_loss(routing: Routing, *, reduction: Reduction = "mean") -> Tensor:
    """Mean over tokens of the square of ``logsumexp(logits)``: keeps logits small.

    Nothing is sent.

    Args:
        routing: Of one layer.
        reduction: "mean", or "sum" to be divided by a global count.

    Raises:
        ValueError: ``reduction`` is neither.
    """
    _check_reduction(reduction)
    squares_T = routing.logits.logsumexp(-1).square()
    if routing.mask is not None:
        squares_T = squares_T.masked_fill(~routing.mask, 0)
    return (
        squares_T.sum() if reduction == "sum" else squares_T.sum() / routing.num_tokens.clamp(min=1)
    )


def _check(
    routing: Routing,
    by_sequence: bool,
    reduction: str,
    tokens_per_expert: Tensor | None,
) -> None:
    _check_reduction(reduction)
    if by_sequence and tokens_per_expert is not None:
        raise ValueError(
            "sequence_length and cu_seqlens must not come with tokens_per_expert: each sequence "
            "has its own counts"
        )
    if tokens_per_expert is not None and tokens_per_expert.shape != (routing.num_experts,):
        raise ValueError(
            f"tokens_per_expert of shape {list(tokens_per_expert.shape)} must be "
            f"[{routing.num_experts}]"
        )


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} must be 'mean' or 'sum'")
