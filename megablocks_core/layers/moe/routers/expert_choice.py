"""Each expert chooses its tokens (Zhou et al., https://arxiv.org/abs/2202.09368, section 3).

Dimensions: T tokens of this rank, H features, E experts, C tokens an expert.
"""

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.layers.moe.counting import count_choices
from megablocks_core.layers.moe.routers.capacity import capacity_of, counted_capacity
from megablocks_core.layers.moe.routers.jitter import Jitter
from megablocks_core.layers.moe.routers.linear_router import LinearRouter
from megablocks_core.layers.moe.routers.scores import (
    SCORES,
    Score,
    balance_scores,
    check_mask,
    check_score,
    highest,
    precise,
)
from megablocks_core.layers.moe.routing import NOWHERE, Routing
from megablocks_core.parallel import remember


def route_expert_choice(
    logits_TE: Tensor,
    *,
    capacity_factor: float,
    score: Score = "softmax",
    mask: Tensor | None = None,
    group: Group = LOCAL,
) -> Routing:
    """Each expert takes the C tokens that score highest with it; a weight is the score itself.

    C is ``ceil(capacity_factor T / E)`` of the tokens of all ranks that count, so such a token has
    ``capacity_factor`` experts on average, and between none and E. Loads are even: no balance
    loss is needed. Of equal scores the earlier token's is taken, ranks in their order.

    Whether a token is taken depends on the tokens after it. A causal model trained so sees its
    future, and a generated token has no later ones to compete with.

    Sent: over more than one rank, an all-gather of the scores, [T E] of each, and of the number
    of tokens. Nothing in backward, since a choice has no gradient.

    Args:
        logits_TE: [T E].
        capacity_factor: Experts a token, on average; at most E.
        score: From logits to scores; softmax is over the experts.
        mask: True for tokens that count [T]; others are not taken.
        group: The ranks whose tokens compete.

    Returns:
        A routing of E slots a token: slot e is e, or nowhere.

    Raises:
        ValueError: A shape does not fit, ``capacity_factor`` is not above 0, or a name is unknown.
    """
    check_group(group)
    check_score(score)
    check_mask(mask, logits_TE)
    with torch.autocast(logits_TE.device.type, enabled=False):
        logits_TE = precise(logits_TE)
        scores_TE = SCORES[score](logits_TE)
        tokens, experts = logits_TE.shape
        ranked = scores_TE.detach()
        if mask is not None:
            ranked = ranked.masked_fill(~mask[:, None], float("-inf"))
        chosen_TE = remember(lambda: _chosen(ranked, capacity_factor, group))
        choices = torch.where(chosen_TE, torch.arange(experts, device=ranked.device), NOWHERE)
        weights = scores_TE.masked_fill(~chosen_TE, 0)
        balanced = balance_scores(scores_TE, score)
        if mask is not None:
            balanced = balanced.masked_fill(~mask[:, None], 0)
        counts = count_choices(choices, experts)
    # Over several ranks an expert may take all its tokens from one.
    most = tokens if group.size > 1 else _places(tokens, experts, capacity_factor)
    return Routing(choices, weights, balanced, logits_TE, counts, mask, most)


class ExpertChoiceRouter(LinearRouter):
    """Each expert takes the tokens that score highest with it, and as many as every other.

    Maps ``x`` [T H] to a ``Routing`` of E slots a token, by ``route_expert_choice`` on the
    logits; see there for what it means for causal models. Sends what that and ``LinearRouter``
    do.

    Args:
        hidden_size: H.
        num_experts: E.
        capacity_factor: Experts a token, on average.
        score: "softmax", "sigmoid" or "sqrtsoftplus".
        jitter: Of what the router reads, in training.
        group: Tensor-parallel ranks that hold different tokens (sequence parallelism). Their
            tokens compete.
        choose_over: Ranks whose tokens compete, if these are more than ``group``, which they
            then include.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: ``capacity_factor`` is not from above 0 to ``num_experts``, a name is unknown,
            or ``choose_over`` lacks ranks of ``group``.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        capacity_factor: float,
        score: Score = "softmax",
        jitter: Jitter | None = None,
        group: Group = LOCAL,
        choose_over: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not 0 < capacity_factor <= num_experts:
            raise ValueError(
                f"capacity_factor={capacity_factor} must be above 0 and at most num_experts="
                f"{num_experts}"
            )
        check_score(score)
        check_group(choose_over, "choose_over")
        super().__init__(
            hidden_size,
            num_experts=num_experts,
            jitter=jitter,
            group=group,
            device=device,
            dtype=dtype,
        )
        if choose_over.size > 1 and not (group.size == 1 or {*group.ranks} <= {*choose_over.ranks}):
            raise ValueError(
                f"choose_over={choose_over} must have all ranks of group={group}, or one alone"
            )
        self.capacity_factor = capacity_factor
        self.score: Score = score
        self.choose_over = choose_over if choose_over.size > 1 else group
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
        return route_expert_choice(
            self.logits(x_TH, index=index),
            capacity_factor=self.capacity_factor,
            score=self.score,
            mask=mask,
            group=self.choose_over,
        )


def _places(num_tokens: int, num_experts: int, factor: float) -> int:
    return capacity_of(num_tokens, top_k=1, num_experts=num_experts, factor=factor)


def _chosen(ranked_TE: Tensor, factor: float, group: Group) -> Tensor:
    """Which expert takes which token of this rank [T E]."""
    parts = [ranked_TE] if group.size == 1 else group.all_gather(ranked_TE)
    whole_TE = torch.cat(parts)
    tokens, experts = whole_TE.shape
    places = _places(tokens, experts, factor)
    best = highest(whole_TE.T, places)
    counted = (whole_TE[:, 0] != float("-inf")).sum()
    allowed = counted_capacity(counted, top_k=1, num_experts=experts, factor=factor)
    first = (torch.arange(places, device=best.device) < allowed).expand_as(best)
    taken = torch.zeros_like(whole_TE.T, dtype=torch.bool).scatter(-1, best, first).T
    start = sum(part.shape[0] for part in parts[: group.rank])
    own = slice(start, start + ranked_TE.shape[0])
    return taken[own] & (ranked_TE != float("-inf"))
