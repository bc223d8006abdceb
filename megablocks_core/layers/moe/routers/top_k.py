"""Routers by which each token chooses its experts.

Softmax: Shazeer et al., https://arxiv.org/abs/1701.06538. Sigmoid scores, a selection bias and
groups: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2.

Dimensions: T tokens of this rank, H features, E experts, k slots a token, G groups.
"""

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group
from megablocks_core.layers.moe.counting import count_choices
from megablocks_core.layers.moe.routers.capacity import Capacity, check_capacity
from megablocks_core.layers.moe.routers.groups import GroupLimit
from megablocks_core.layers.moe.routers.jitter import Jitter
from megablocks_core.layers.moe.routers.linear_router import LinearRouter
from megablocks_core.layers.moe.routers.scores import (
    SCORES,
    Score,
    balance_scores,
    check_choices,
    check_mask,
    check_score,
    check_top_k,
    highest,
    precise,
    weights_of,
)
from megablocks_core.layers.moe.routing import NOWHERE, Routing
from megablocks_core.parallel import remember


def route_top_k(
    logits_TE: Tensor,
    *,
    top_k: int,
    score: Score = "softmax",
    renormalize: bool | float = True,
    scale: float = 1.0,
    groups: GroupLimit | None = None,
    selection_bias: Tensor | None = None,
    mask: Tensor | None = None,
    choices: Tensor | None = None,
) -> Routing:
    """Each token's ``top_k`` experts by score, and the weights of their results.

    A weight is the score of its expert over the norm of the token's ``top_k`` scores, times
    ``scale``. (Softmax over the chosen logits alone is softmax over all, renormalised.) Ties go
    to the lowest expert. A choice has no gradient; in a recomputed region it is that of the first
    run. Nothing is sent.

    Args:
        logits_TE: [T E]; scores are float32, or float64 of float64 logits, also under autocast.
        top_k: k.
        score: From logits to scores.
        renormalize: ``True`` over the sum, ``p`` over the p-norm, ``False`` not at all.
        scale: Of the weights.
        groups: A limit on which experts a token may choose.
        selection_bias: Added to the scores for the choice alone [E].
        mask: True for tokens that count [T]; others go to no expert.
        choices: Experts to take in place of the best [T k], such as those of an earlier routing;
            negative ones are nowhere.

    Raises:
        ValueError: A shape does not fit, ``top_k`` is not from 1 to E, or a token's choices are
            not int64, not below E, or not different.
    """
    check_mask(mask, logits_TE)
    check_options(logits_TE.shape[1], top_k, score=score, renormalize=renormalize, groups=groups)
    _check_shapes(logits_TE, top_k, selection_bias=selection_bias, choices=choices)
    if choices is not None:
        check_choices(choices, logits_TE.shape[1])
    with torch.autocast(logits_TE.device.type, enabled=False):
        logits_TE = precise(logits_TE)
        scores_TE = SCORES[score](logits_TE)
        plain = groups is None and selection_bias is None
        if choices is None:
            choices = remember(
                lambda: _choose(
                    # Logits rank as softmax scores do, and differ where those round to one value.
                    logits_TE if plain and score == "softmax" else scores_TE,
                    top_k,
                    groups=groups,
                    selection_bias=selection_bias,
                )
            )
        if mask is not None:
            choices = choices.masked_fill(~mask[:, None], NOWHERE)
        weights_Tk = weights_of(logits_TE, scores_TE, choices, score, renormalize) * scale
        balanced_TE = balance_scores(scores_TE, score)
        if mask is not None:
            balanced_TE = balanced_TE.masked_fill(~mask[:, None], 0)
        counts_E = count_choices(choices, logits_TE.shape[-1])
    return Routing(choices, weights_Tk, balanced_TE, logits_TE, counts_E, mask)


class TopKRouter(LinearRouter):
    """Each token goes to the ``top_k`` experts that score it highest.

    Maps ``x`` [T H] to the ``Routing`` of its tokens, by ``route_top_k`` on the logits. Sends
    what ``LinearRouter`` does.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: k.
        score: "softmax", "sigmoid" or "sqrtsoftplus".
        renormalize: Weights over their sum; a number p: over their p-norm.
        scale: Of the weights.
        groups: A limit on which experts a token may choose.
        bias: Add a bias to the logits.
        selection_bias: Have a buffer ``e_score_correction_bias`` [E], added to scores for the
            choice alone; ``update_selection_bias`` says how it changes. It is float32 for good.
        jitter: Of what the router reads, in training.
        capacity: At most so many tokens an expert.
        group: Tensor-parallel ranks that hold different tokens (sequence parallelism).
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: ``top_k`` is not from 1 to ``num_experts``, groups do not divide the experts,
            or a name is unknown.
    """

    e_score_correction_bias: Tensor | None

    def __init__(  # noqa: PLR0913 (each is an option of its own)
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        score: Score = "softmax",
        renormalize: bool | float = True,
        scale: float = 1.0,
        groups: GroupLimit | None = None,
        bias: bool = False,
        selection_bias: bool = False,
        jitter: Jitter | None = None,
        capacity: Capacity | None = None,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_options(num_experts, top_k, score=score, renormalize=renormalize, groups=groups)
        super().__init__(
            hidden_size,
            num_experts=num_experts,
            bias=bias,
            jitter=jitter,
            group=group,
            device=device,
            dtype=dtype,
        )
        self.top_k, self.capacity = top_k, check_capacity(capacity)
        self.score: Score = score
        self.renormalize, self.scale, self.groups = renormalize, scale, groups
        corrected = torch.empty(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", corrected if selection_bias else None)
        self.reset_parameters()

    def forward(
        self,
        x_TH: Tensor,
        *,
        mask: Tensor | None = None,
        index: Tensor | None = None,
        choices: Tensor | None = None,
    ) -> Routing:
        """Route the tokens.

        Args:
            x_TH: Tokens [T H].
            mask: True for tokens that count [T].
            index: A word a token from ``DropoutKey.index`` [T], if the router jitters.
            choices: Experts to take in place of the best [T k].
        """
        routing = route_top_k(
            self.logits(x_TH, index=index),
            top_k=self.top_k,
            score=self.score,
            renormalize=self.renormalize,
            scale=self.scale,
            groups=self.groups,
            selection_bias=self.e_score_correction_bias,
            mask=mask,
            choices=choices,
        )
        return routing if self.capacity is None else self.capacity.limit(routing)

    def extra_repr(self) -> str:
        """Sizes and score."""
        return f"{super().extra_repr()}, top_k={self.top_k}, score={self.score!r}"


def check_options(
    num_experts: int,
    top_k: int,
    *,
    score: str,
    renormalize: bool | float,
    groups: GroupLimit | None,
) -> None:
    """Raise unless the choice is possible."""
    check_top_k(num_experts, top_k)
    check_score(score)
    if not isinstance(renormalize, bool) and renormalize <= 0:
        raise ValueError(f"renormalize={renormalize} must be True, False or a norm's order above 0")
    if groups is not None:
        if not isinstance(groups, GroupLimit):
            raise ValueError(f"groups={groups!r} must be a GroupLimit")
        groups.check(num_experts, top_k)


def _choose(
    scores_TE: Tensor,
    top_k: int,
    *,
    groups: GroupLimit | None,
    selection_bias: Tensor | None,
) -> Tensor:
    scores_TE = scores_TE if selection_bias is None else scores_TE + selection_bias
    return highest(scores_TE if groups is None else groups.limit(scores_TE), top_k)


def _check_shapes(logits_TE: Tensor, top_k: int, **others: Tensor | None) -> None:
    tokens, experts = logits_TE.shape
    right = {"selection_bias": (experts,), "choices": (tokens, top_k)}
    for name, tensor in others.items():
        if tensor is not None and tuple(tensor.shape) != right[name]:
            raise ValueError(f"{name} of shape {list(tensor.shape)} must be of {list(right[name])}")
