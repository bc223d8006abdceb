"""A mixture of experts: a router, a dispatcher and experts joined.

Shared experts: DeepSeekMoE, https://arxiv.org/abs/2401.06066, section 3.2; their gate: Qwen2,
https://arxiv.org/abs/2407.10671, section 2.2. Latent experts: Megatron-LM's
``moe_latent_size``.

Dimensions: T tokens of this rank, H features, L features of latent experts.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group
from megablocks_core.layers.moe.dispatch import Dispatcher
from megablocks_core.layers.moe.dispatch.agreement import REFUSED, number_of
from megablocks_core.layers.moe.inputs import check_inputs
from megablocks_core.layers.moe.routing import Routing
from megablocks_core.layers.moe.zero_computation import ZeroComputationExperts, computed
from megablocks_core.layers.norm import on_part
from megablocks_core.parallel.checks import check_whole

_FACTS = ("hidden_size", "dtype", "top_k", "chunks")  # that ranks must have alike


class MoE(nn.Module):
    """Each token's sum over its experts, weighted by the router, and what all tokens share.

    Maps ``x`` [... T H] to ``y`` [... T H] and the ``Routing`` of its tokens. It holds nothing
    between calls: any number may be under way, and evaluation changes nothing.

    Sends what router and dispatcher send, and ``shared``; before it one small message, so that
    ranks whose arguments do not fit or differ raise together. Where tokens are sharded over
    tensor-parallel ranks, backward all-reduces the gradients of ``shared_gate``, ``latent_down``
    and ``latent_up`` in one message. Shared experts are computed while tokens travel, and with
    ``chunks`` the experts of one piece while another travels, where a dispatcher sends without
    waiting.

    Args:
        router: From tokens [T H] to a ``Routing``; called with ``mask``, and with ``index`` and
            ``choices`` where they are given.
        dispatcher: Brings tokens to experts and back.
        experts: From ``Dispatched`` to weighted results.
        shared: Experts of all tokens, from tensor to tensor.
        shared_gate: From tokens to the logit [... T 1] by whose sigmoid ``shared`` is weighted,
            such as ``nn.Linear(hidden_size, 1, bias=False)``.
        latent_down: Tokens [T H] to what experts take [T L]; the router reads all H features.
        latent_up: The experts' sums [T L] to results [T H].
        zero_computation: Experts that compute next to nothing; the router counts them last.
        chunks: Pieces in which tokens travel.

    Raises:
        ValueError: The parts do not agree on the number of experts or of features, on who shares
            experts, or on which tokens a rank holds; one latent projection or ``shared`` is
            missing. In a call, on all ranks of the dispatcher: an input does not fit, or ranks
            differ in what they must have alike.
    """

    gate: Any
    experts: Any

    def __init__(
        self,
        *,
        router: nn.Module,
        dispatcher: Dispatcher,
        experts: nn.Module,
        shared: nn.Module | None = None,
        shared_gate: nn.Module | None = None,
        latent_down: nn.Module | None = None,
        latent_up: nn.Module | None = None,
        zero_computation: ZeroComputationExperts | None = None,
        chunks: int = 1,
    ) -> None:
        super().__init__()
        for name, part in (("router", router), ("experts", experts)):
            if not isinstance(part, nn.Module):
                raise ValueError(f"{name}={part!r} must be a module")
        if not isinstance(dispatcher, Dispatcher):
            raise ValueError(f"dispatcher={dispatcher!r} must be a Dispatcher")
        _check_numbers(router, dispatcher, experts, zero_computation)
        _check_groups(router, dispatcher, experts, zero_computation)
        if shared_gate is not None and shared is None:
            raise ValueError("shared=None must be a module where shared_gate is given")
        if (latent_down is None) != (latent_up is None):
            raise ValueError("latent_down and latent_up must be given together")
        check_whole("chunks", chunks, least=1)
        self.gate = router
        self.dispatcher = dispatcher
        self.experts = experts
        self.shared_experts = shared
        self.shared_expert_gate = shared_gate
        self.fc1_latent_proj, self.fc2_latent_proj = latent_down, latent_up
        self.zero_computation = zero_computation
        self.chunks = chunks
        self.num_experts: int | None = getattr(router, "num_experts", None)
        self.hidden_size = _hidden_size(router, experts, latent_down)
        # Where ``bind`` looks; an unpickled dispatcher has the same objects.
        self.group = _group(router, "group")
        self.tp, self.ep, self.etp = (_group(dispatcher, axis) for axis in ("tp", "ep", "etp"))

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        index: Tensor | None = None,
        choices: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """Apply the layer.

        Args:
            x: Tokens [... T H].
            mask: True for tokens that count [... T]; the routed experts give others zero.
            index: For a router that asks for it, a word for each token [... T]: where jitter is
                drawn, or a token's id.
            choices: Experts to take in place of the router's own [... T k], such as those of an
                earlier routing.
        """
        self._agree(x, mask=mask, index=index, choices=choices)
        gate, down, up = self._on_part()
        x_TH = x.reshape(-1, x.shape[-1])
        words = {} if index is None else {"index": index.flatten()}
        words |= {} if choices is None else {"choices": choices.flatten(end_dim=-2)}
        routing = self.gate(x_TH, mask=None if mask is None else mask.flatten(), **words)
        sent = routing
        if self.zero_computation is not None:
            sent = computed(routing, self.zero_computation.num_experts)
        pieces = self.dispatcher.start_dispatch(
            x_TH if down is None else down(x_TH), sent, chunks=self.chunks
        )
        beside = self._beside(x, gate)
        results = []
        for piece in pieces:
            dispatched, handle = piece.wait()
            results.append(self.dispatcher.start_combine(self.experts(dispatched), handle))
        y_TH = self.dispatcher.finish_combine(results)
        y_TH = y_TH if up is None else up(y_TH)
        if self.zero_computation is not None:
            y_TH = y_TH + self.zero_computation(x_TH, routing)
        y = y_TH.view_as(x)
        return (y if beside is None else y + beside), routing

    def _agree(self, x: Tensor, **words: Tensor | None) -> None:
        """Raise on all ranks if one cannot go on, or would go on with something else."""
        refusal: ValueError | None = None
        top_k: int | None = getattr(self.gate, "top_k", None)
        sizes = {"hidden_size": self.hidden_size, "num_experts": self.num_experts, "top_k": top_k}
        try:
            check_inputs(x, words, **sizes)
        except ValueError as error:
            refusal = error
        if refusal is not None:
            device = next(self.parameters(), torch.empty(0)).device
            with suppress(ValueError):
                self.dispatcher.agree({**dict.fromkeys(_FACTS, 0), REFUSED: 1}, device=device)
            raise refusal
        facts = (x.shape[-1], number_of(x.dtype), top_k or 0, self.chunks, 0)
        self.dispatcher.agree(dict(zip((*_FACTS, REFUSED), facts, strict=True)), device=x.device)

    def _on_part(self) -> tuple[Callable[[Tensor], Tensor] | None, ...]:
        """Gate and latent projections, whose gradients are summed where tokens are sharded."""
        parts = (self.shared_expert_gate, self.fc1_latent_proj, self.fc2_latent_proj)
        there = iter(on_part(*(part for part in parts if part is not None), group=self.group))
        return tuple(None if part is None else next(there) for part in parts)

    def _beside(self, x: Tensor, gate: Callable[[Tensor], Tensor] | None) -> Tensor | None:
        """What the shared experts add."""
        if self.shared_experts is None:
            return None
        shared = self.shared_experts(x)
        return shared if gate is None else gate(x).sigmoid() * shared


def _hidden_size(
    router: nn.Module, experts: nn.Module, latent_down: nn.Module | None
) -> int | None:
    """H, if a part says it; parts that say another size raise."""
    routed: int | None = getattr(router, "hidden_size", None)
    inside: int | None = getattr(experts, "hidden_size", None)
    outside: int | None = inside
    if latent_down is not None:
        outside = getattr(latent_down, "in_features", None)
        latent: int | None = getattr(latent_down, "out_features", None)
        if None not in (latent, inside) and latent != inside:
            raise ValueError(
                f"latent_down to {latent} features must lead to those of experts: {inside}"
            )
    if None not in (routed, outside) and routed != outside:
        raise ValueError(f"router of hidden_size={routed} must read what experts do: {outside}")
    return outside if routed is None else routed


def _check_numbers(
    router: nn.Module,
    dispatcher: Dispatcher,
    experts: nn.Module,
    zero_computation: ZeroComputationExperts | None,
) -> None:
    routed: int | None = getattr(router, "num_experts", None)
    free = 0 if zero_computation is None else zero_computation.num_experts
    for name, part, more in (("experts", experts, free), ("dispatcher", dispatcher, free)):
        number: int | None = getattr(part, "num_experts", None)
        if routed is not None and number is not None and routed != number + more:
            beside = f" and {free} without computation" if free else ""
            raise ValueError(
                f"router of num_experts={routed} must have those of {name}: {number}{beside}"
            )


def _check_groups(
    router: nn.Module,
    dispatcher: Dispatcher,
    experts: nn.Module,
    zero_computation: ZeroComputationExperts | None,
) -> None:
    for axis in ("ep", "etp"):
        of_dispatcher, of_experts = (_group(part, axis) for part in (dispatcher, experts))
        if of_dispatcher.ranks != of_experts.ranks and of_dispatcher.size * of_experts.size != 1:
            raise ValueError(
                f"{axis}={of_dispatcher} of the dispatcher must be that of experts: {of_experts}"
            )
    tp, tokens = _group(dispatcher, "tp"), getattr(dispatcher, "tokens", "sharded")
    over = tp if tokens == "sharded" else LOCAL
    parts = {"router": router, "zero_computation": zero_computation}
    for name, part in parts.items():
        group = over if part is None else _group(part, "group")
        alike = group.size == over.size == 1 or group.ranks == over.ranks
        if hasattr(dispatcher, "tp") and not alike:
            raise ValueError(
                f"group={group} of {name} must be {over}, because the dispatcher's tokens are "
                f"{tokens} over tp={tp}"
            )


def _group(part: object, name: str) -> Group:
    return getattr(part, name, LOCAL)
