"""Choices balanced over a batch by Sinkhorn's iteration (Megatron-LM's convention).

S-BASE: https://arxiv.org/abs/2202.01169, section 3.2.

Dimensions: T tokens of this rank, H features, E experts, k slots a token.
"""

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.layers.moe.routers.capacity import Capacity, check_capacity
from megablocks_core.layers.moe.routers.jitter import Jitter
from megablocks_core.layers.moe.routers.linear_router import LinearRouter
from megablocks_core.layers.moe.routers.scores import check_mask, check_top_k, highest, precise
from megablocks_core.layers.moe.routers.top_k import route_top_k
from megablocks_core.layers.moe.routing import Routing
from megablocks_core.parallel import remember

# What the reference adds to sums before it divides by them.
_EPS = 1e-8


@torch.no_grad()
def sinkhorn(
    logits_TE: Tensor,
    *,
    mask: Tensor | None = None,
    iterations: int = 20,
    tolerance: float = 1e-4,
    group: Group = LOCAL,
) -> Tensor:
    """``exp(logits)`` with rows scaled to add up to 1/T and columns to 1/E [T E].

    Rows and columns are scaled in turn until the columns' factors move by ``tolerance`` on
    average or less. Later iterations then change nothing: how many ran is not read on the host.

    Sent: over more than one rank, an all-reduce of E sums an iteration and one of the number
    of tokens.

    Args:
        logits_TE: [T E].
        mask: True for tokens that count [T]; rows of others are 0.
        iterations: How many at most.
        tolerance: See above.
        group: The ranks whose tokens make the batch.

    Raises:
        ValueError: ``iterations`` is below 1.
    """
    _check_iterations(iterations)
    logits_TE = precise(logits_TE)
    num_experts = logits_TE.shape[1]
    # The greatest of each row is taken away, which only rescales its factor.
    cost = (logits_TE - logits_TE.amax(dim=1, keepdim=True)).exp()
    if mask is not None:
        cost = cost.masked_fill(~mask[:, None], 0)
    counted = cost.new_tensor(cost.shape[0]) if mask is None else mask.sum().to(cost.dtype)
    num_tokens = group.all_reduce(counted).clamp(min=1)
    columns, moves = cost.new_ones(num_experts), cost.new_full((), float("inf"))
    rows = cost.new_zeros(cost.shape[0])
    for _ in range(iterations):
        going = moves > tolerance
        next_rows = 1 / (num_tokens * ((columns * cost).sum(dim=1) + _EPS))
        sums = group.all_reduce((next_rows[:, None] * cost).sum(dim=0))
        next_columns = 1 / (num_experts * (sums + _EPS))
        moves = torch.where(going, (next_columns - columns).abs().mean(), moves)
        rows = torch.where(going, next_rows, rows)
        columns = torch.where(going, next_columns, columns)
    return columns * cost * rows[:, None]


def route_sinkhorn(
    logits_TE: Tensor,
    *,
    top_k: int,
    balance: bool = True,
    iterations: int = 20,
    mask: Tensor | None = None,
    group: Group = LOCAL,
) -> Routing:
    """Each token's ``top_k`` experts by the balanced scores of ``sinkhorn``.

    Weights are those of the logits themselves and have gradients: sigmoid for one expert a token,
    softmax over all experts for more, not renormalised.

    Args:
        logits_TE: [T E].
        top_k: k.
        balance: True in training; else the experts are the best by logit.
        iterations: Of ``sinkhorn``, at most.
        mask: True for tokens that count [T].
        group: The ranks whose tokens make the batch; see ``sinkhorn`` for what is sent.

    Raises:
        ValueError: ``top_k`` is not from 1 to E, or a shape does not fit.
    """
    check_group(group)
    check_mask(mask, logits_TE)
    choices = None
    if balance:
        check_top_k(logits_TE.shape[1], top_k)
        choices = remember(
            lambda: highest(
                sinkhorn(logits_TE, mask=mask, iterations=iterations, group=group), top_k
            )
        )
    score = "sigmoid" if top_k == 1 else "softmax"
    return route_top_k(
        logits_TE, top_k=top_k, score=score, renormalize=False, mask=mask, choices=choices
    )


class SinkhornRouter(LinearRouter):
    """In training choices are balanced over the batch; in evaluation they are the best.

    Maps ``x`` [T H] to a ``Routing``, by ``route_sinkhorn`` on the logits. No balance loss is
    needed. Sends what that and ``LinearRouter`` do.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: k.
        iterations: Of ``sinkhorn``, at most.
        jitter: Of what the router reads, in training.
        capacity: At most so many tokens an expert.
        group: Tensor-parallel ranks that hold different tokens; together they make the batch.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: ``top_k`` is not from 1 to ``num_experts``, or ``iterations`` is below 1.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        iterations: int = 20,
        jitter: Jitter | None = None,
        capacity: Capacity | None = None,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_top_k(num_experts, top_k)
        _check_iterations(iterations)
        super().__init__(
            hidden_size,
            num_experts=num_experts,
            jitter=jitter,
            group=group,
            device=device,
            dtype=dtype,
        )
        self.top_k, self.iterations = top_k, iterations
        self.capacity = check_capacity(capacity)
        self.reset_parameters()

    def forward(
        self, x_TH: Tensor, *, mask: Tensor | None = None, index: Tensor | None = None
    ) -> Routing:
        """Route the tokens.

        Args:
            x_TH: Tokens [T H].
            mask: True for tokens that count [T].
            index: A word a token from ``DropoutKey.index`` [T], if the router jitters.
        """
        logits_TE = self.logits(x_TH, index=index)
        routing = route_sinkhorn(
            logits_TE,
            top_k=self.top_k,
            balance=self.training,
            iterations=self.iterations,
            mask=mask,
            group=self.group,
        )
        return routing if self.capacity is None else self.capacity.limit(routing)


def _check_iterations(iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"iterations={iterations} must be at least 1")
