"""Experts that compute next to nothing, beside those that are dispatched.

MoE++, https://arxiv.org/abs/2410.07348, section 3.1; LongCat-Flash,
https://arxiv.org/abs/2509.01322, section 2.1.

Dimensions: T tokens of this rank, k slots a token, H features, E experts, Z of them here, C of
these constant ones.
"""

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, check_group, copy_to
from megablocks_core.layers.moe.routing import NOWHERE, Routing
from megablocks_core.parallel.checks import check_whole
from megablocks_core.parallel.initial import key_for, normal_


class ZeroComputationExperts(nn.Module):
    """The weighted sum of a token's experts among the last Z of the router.

    They are numbered in this order: ``identity`` experts give the token itself, ``zero`` ones
    nothing, and a ``constant`` one ``a x + b v``, of its vector ``v`` [H] (at first zero) and
    ``a, b = softmax(x W^T)``, W [2 H]. No token travels to them. Where ranks of ``group`` hold
    different tokens, backward all-reduces the gradients of the constant ones in one message.

    Args:
        hidden_size: H.
        identity: How many give the token.
        zero: How many give nothing.
        constant: How many give a vector of their own.
        group: Tensor-parallel ranks that hold different tokens, as the router's.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: A number is negative, or there is no expert.
    """

    vectors: nn.Parameter | None
    mixers: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        *,
        identity: int = 0,
        zero: int = 0,
        constant: int = 0,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_group(group)
        kinds = {"identity": identity, "zero": zero, "constant": constant}
        for name, count in kinds.items():
            check_whole(name, count, least=0)
        if not any(kinds.values()):
            raise ValueError(f"one of {', '.join(kinds)} must be above 0")
        self.identity, self.zero, self.constant, self.group = identity, zero, constant, group
        self.num_experts = identity + zero + constant
        vectors = mixers = None
        if constant:
            place = {"device": device, "dtype": dtype}
            vectors = nn.Parameter(torch.empty(constant, hidden_size, **place))
            mixers = nn.Parameter(torch.empty(constant, 2, hidden_size, **place))
        self.register_parameter("vectors", vectors)
        self.register_parameter("mixers", mixers)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Vectors are zero, and W has normal values of deviation H^-0.5."""
        if self.vectors is not None and self.mixers is not None:
            self.vectors.zero_()
            key = key_for(self.mixers, f"{prefix}mixers", seed)
            normal_(self.mixers, key=key, std=self.mixers.shape[-1] ** -0.5)

    def forward(self, x_TH: Tensor, routing: Routing) -> Tensor:
        """What they add to each token [T H].

        Args:
            x_TH: Tokens [T H].
            routing: Of all experts of the router.
        """
        first = routing.num_experts - self.num_experts
        indices, weights = routing.indices, routing.weights
        is_identity = (indices >= first) & (indices < first + self.identity)
        kept_T1 = weights.masked_fill(~is_identity, 0).sum(-1, keepdim=True)
        if self.vectors is None or self.mixers is None:
            return (kept_T1 * x_TH).to(x_TH.dtype)
        vectors, mixers = copy_to(self.vectors, self.mixers, group=self.group)
        numbers_C = torch.arange(self.constant, device=indices.device)
        chosen_TkC = indices.unsqueeze(-1) == first + self.identity + self.zero + numbers_C
        weights_TC = (weights.unsqueeze(-1) * chosen_TkC).sum(1)
        logits_TC2 = (x_TH @ mixers.flatten(0, 1).T).unflatten(-1, (-1, 2))
        shares_TC2 = weights_TC.unsqueeze(-1) * logits_TC2.to(weights.dtype).softmax(-1)
        kept_T1 = kept_T1 + shares_TC2[..., 0].sum(-1, keepdim=True)
        own_TH = shares_TC2[..., 1].to(vectors.dtype) @ vectors
        return (kept_T1 * x_TH + own_TH).to(x_TH.dtype)

    def extra_repr(self) -> str:
        """How many there are of each kind."""
        return f"identity={self.identity}, zero={self.zero}, constant={self.constant}"


def computed(routing: Routing, num_free: int) -> Routing:
    """The routing of all experts but the last ``num_free``, whose slots become empty."""
    number = routing.num_experts - num_free
    is_free = routing.indices >= number
    return routing._replace(
        indices=routing.indices.masked_fill(is_free, NOWHERE),
        weights=routing.weights.masked_fill(is_free, 0),
        scores=routing.scores[:, :number],
        logits=routing.logits[:, :number],
        tokens_per_expert=routing.tokens_per_expert[:number],
    )
