"""Balance by quantiles: a bias an expert at which it would take its share of the batch.

Megatron-LM's quantile balancing: one step of coordinate descent on the dual of the assignment of
tokens to experts of equal load.

Dimensions: T tokens of this rank, H features, E experts, k slots a token.
"""

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.layers.moe.routers.capacity import Capacity, check_capacity
from megablocks_core.layers.moe.routers.jitter import Jitter
from megablocks_core.layers.moe.routers.linear_router import LinearRouter
from megablocks_core.layers.moe.routers.scores import Score, check_mask, highest, precise
from megablocks_core.layers.moe.routers.top_k import check_options, route_top_k
from megablocks_core.layers.moe.routing import Routing
from megablocks_core.parallel import remember


@torch.no_grad()
def update_quantile_bias(
    bias_E: Tensor,
    logits_TE: Tensor,
    *,
    top_k: int,
    ema: float = 0.0,
    mask: Tensor | None = None,
    group: Group = LOCAL,
) -> Tensor:
    """The next bias [E]: ``ema * bias + (1 - ema) * quantile``, which is returned, not kept.

    With ``a`` the token's (k+1)-th highest ``logits - bias``, an expert's quantile is the value
    that ``floor(T k / E)`` of its ``logits - a`` exceed: taken as the bias, it would give the
    expert that many tokens. Call it once a step, with the logits of the routing that it made.

    Sent: over more than one rank an all-gather of the logits.

    Args:
        bias_E: The bias by which the logits were ranked [E].
        logits_TE: Of a ``Routing`` [T E].
        top_k: k, below E.
        ema: How much of the bias stays, from 0 to below 1.
        mask: True for tokens that count [T].
        group: The ranks that hold different tokens.

    Raises:
        ValueError: ``top_k`` is not from 1 to E - 1, ``ema`` is out of its range, or a shape does
            not fit.
    """
    check_group(group)
    check_mask(mask, logits_TE)
    tokens, experts = logits_TE.shape
    if not 1 <= top_k < experts:
        raise ValueError(f"top_k={top_k} must be from 1 to {experts - 1}, one below the experts")
    if not 0 <= ema < 1:
        raise ValueError(f"ema={ema} must be from 0 to below 1")
    if bias_E.shape != (experts,):
        raise ValueError(f"bias of shape {list(bias_E.shape)} must be of [{experts}]")
    logits_TE = precise(logits_TE)
    if mask is not None:
        logits_TE = logits_TE.masked_fill(~mask[:, None], float("-inf"))
    if group.size > 1:
        logits_TE = torch.cat(group.all_gather(logits_TE))
    if logits_TE.shape[0] == 0:
        return bias_E.clone()
    counted = (logits_TE[:, :1] > float("-inf")).sum(dim=0)
    next_best = (logits_TE - bias_E).topk(top_k + 1, dim=1).values[:, -1:]
    # A token that does not count would be infinity less infinity.
    above = (logits_TE - next_best).nan_to_num(nan=float("-inf"))
    place = (counted * top_k // experts).expand(1, experts)
    quantile = above.sort(dim=0, descending=True).values.gather(0, place)[0]
    quantile = torch.where(counted > 0, quantile, bias_E)
    return (ema * bias_E + (1 - ema) * quantile).to(bias_E.dtype)


def route_quantile(
    logits_TE: Tensor,
    bias_E: Tensor,
    *,
    top_k: int,
    score: Score = "softmax",
    renormalize: bool | float = True,
    scale: float = 1.0,
    mask: Tensor | None = None,
) -> Routing:
    """Each token's ``top_k`` experts by ``logits - bias``; weights are those of ``route_top_k``.

    Raises:
        ValueError: See ``route_top_k``; or the bias is not [E].
    """
    experts = logits_TE.shape[-1]
    if bias_E.shape != (experts,):
        raise ValueError(f"bias of shape {list(bias_E.shape)} must be of [{experts}]")
    check_options(experts, top_k, score=score, renormalize=renormalize, groups=None)
    return route_top_k(
        logits_TE,
        top_k=top_k,
        score=score,
        renormalize=renormalize,
        scale=scale,
        mask=mask,
        choices=remember(lambda: highest(precise(logits_TE) - bias_E, top_k)),
    )


class QuantileRouter(LinearRouter):
    """Top-k by logits less a bias ``qb_beta`` [E], float32, that evens the load.

    Maps ``x`` [T H] to a ``Routing``, by ``route_quantile`` on the logits. Once a step set
    ``router.qb_beta.copy_(update_quantile_bias(router.qb_beta, routing.logits, top_k=...))``.
    Sends what ``LinearRouter`` does.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: k.
        score: "softmax", "sigmoid" or "sqrtsoftplus", of the weights.
        renormalize: Weights over their sum; a number p: over their p-norm.
        scale: Of the weights.
        jitter: Of what the router reads, in training.
        capacity: At most so many tokens an expert.
        group: Tensor-parallel ranks that hold different tokens (sequence parallelism).
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: ``top_k`` is not from 1 to ``num_experts``, or a name is unknown.
    """

    qb_beta: Tensor

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        score: Score = "softmax",
        renormalize: bool | float = True,
        scale: float = 1.0,
        jitter: Jitter | None = None,
        capacity: Capacity | None = None,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_options(num_experts, top_k, score=score, renormalize=renormalize, groups=None)
        super().__init__(
            hidden_size,
            num_experts=num_experts,
            jitter=jitter,
            group=group,
            device=device,
            dtype=dtype,
        )
        self.top_k, self.capacity = top_k, check_capacity(capacity)
        self.score: Score = score
        self.renormalize, self.scale = renormalize, scale
        self.register_buffer("qb_beta", torch.empty(num_experts, device=device))
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
        routing = route_quantile(
            self.logits(x_TH, index=index),
            self.qb_beta,
            top_k=self.top_k,
            score=self.score,
            renormalize=self.renormalize,
            scale=self.scale,
            mask=mask,
        )
        return routing if self.capacity is None else self.capacity.limit(routing)
