"""The feed-forward part of a decoder's block: dense, or a mixture of experts, and its losses.

Dimensions: T tokens, t those of this rank, E documents.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, Mesh, reduce_from
from megablocks_core.layers.mlp import MLP, GatedMLP
from megablocks_core.layers.moe import (
    AllToAllDispatcher,
    GroupedExperts,
    GroupLimit,
    LocalDispatcher,
    MoE,
    Routing,
    TopKRouter,
    load_balance_loss,
    z_loss,
)
from megablocks_core.layers.spec import DecoderSpec, MoESpec
from megablocks_core.parallel import Dropout

Losses = dict[str, list[tuple[Tensor, Tensor]]]

# Experts, gated and not, by the names of Hugging Face's configs.
_GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
}
_PLAIN = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def feed_forward(
    spec: DecoderSpec,
    *,
    experts: Callable[..., nn.Module] | None,
    stream: str,
    projections: dict[str, Any],
) -> nn.Module:
    """A ``GatedMLP``, or an ``MLP`` where the spec says so.

    Args:
        spec: Of the model.
        experts: In a model without experts, called in place of ``GatedMLP`` or ``MLP``.
        stream: Name of the part, if it drops.
        projections: Of feed-forward layers: ``linear``, ``tp``, ``sequence_parallel``, ``device``
            and ``dtype``.

    Raises:
        ValueError: Sizes do not divide evenly over the mesh.
    """
    drops = spec.activation_dropout > 0  # What experts= builds need not know of it otherwise.
    dropout = {"dropout": Dropout(spec.activation_dropout, stream=stream)} if drops else {}
    own = GatedMLP if spec.gated_mlp else MLP
    build = own if experts is None or spec.moe is not None else experts
    return build(
        spec.hidden_size,
        spec.ffn_size,
        activation=spec.activation,
        bias=spec.mlp_bias,
        **dropout,
        **projections,
    )


def mixture(
    spec: DecoderSpec,
    moe: MoESpec,
    *,
    mesh: Mesh | None,
    experts: Callable[..., nn.Module] | None,
    projections: dict[str, Any],
) -> MoE:
    """The mixture of experts of a block.

    Args:
        spec: Of the model.
        moe: Of its experts.
        mesh: Experts are cut over its ``expert`` axes ep and etp.
        experts: In place of ``GroupedExperts``.
        projections: As of ``feed_forward``.

    Raises:
        ValueError: Sizes do not divide evenly over the mesh, or experts have no such activation.
    """
    activations = _GATED if spec.gated_mlp else _PLAIN
    if spec.activation not in activations:
        raise ValueError(f"activation={spec.activation!r} must be one of {', '.join(activations)}")
    ep, etp = (LOCAL if mesh is None else mesh.expert.group(axis) for axis in ("ep", "etp"))
    tp, sharded = projections["tp"], projections["sequence_parallel"]
    place = {name: projections[name] for name in ("device", "dtype")}
    blank = partial(_blank, **place)
    hidden, number = spec.hidden_size, moe.num_experts
    router = blank(
        TopKRouter,
        hidden,
        num_experts=number,
        top_k=moe.top_k,
        score=moe.score,
        renormalize=moe.renormalize,
        scale=moe.scale,
        groups=None
        if moe.num_groups == 1
        else GroupLimit(moe.num_groups, moe.top_k_groups, best=2),
        selection_bias=moe.selection_bias,
        group=tp if sharded else LOCAL,
    )
    dispatcher = LocalDispatcher()
    if max(group.size for group in (ep, etp, tp)) > 1:
        tokens = "sharded" if sharded else "replicated"
        dispatcher = AllToAllDispatcher(num_experts=number, ep=ep, etp=etp, tp=tp, tokens=tokens)
    sizes = (number, hidden, moe.ffn_size)
    options = {"activation": activations[spec.activation], "ep": ep, "etp": etp}
    shared = gate = None
    if moe.shared_ffn_size:
        kind = GatedMLP if spec.gated_mlp else MLP
        words = {"activation": spec.activation, "bias": spec.mlp_bias, **projections}
        shared = kind(hidden, moe.shared_ffn_size, **words)
    if moe.shared_gate:
        gate = blank(nn.Linear, hidden, 1, bias=False)
    return MoE(
        router=router,
        dispatcher=dispatcher,
        experts=blank(GroupedExperts, *sizes, **options)
        if experts is None
        else experts(*sizes, **options, **place),
        shared=shared,
        shared_gate=gate,
    )


def routing_losses(
    routings: Sequence[Routing],
    *,
    num_tokens: Tensor | int,
    row_length: int,
    cu_seqlens: Tensor | None,
    group: Group,
) -> Losses:
    """ "load_balance" and "z" as (sum, count) of each mixture, whose sums are over ``group``.

    Loads are balanced in each row or document, so that no loss depends on micro-batches, packing
    or the number of ranks.

    Args:
        routings: Of this rank's tokens, one a mixture.
        num_tokens: How many tokens of all ranks count.
        row_length: This rank's tokens of a row, t.
        cu_seqlens: Where documents are stored in the one row [E+1]; ``None``: a row is one.
        group: Ranks that hold other tokens of the same rows.
    """
    if not routings:
        return {}
    if not isinstance(num_tokens, Tensor):
        num_tokens = routings[0].tokens_per_expert.new_tensor(num_tokens)
    sequences: dict[str, Any] = {"sequence_length": max(row_length, 1)}
    if cu_seqlens is not None:
        own = (cu_seqlens - group.rank * row_length).clamp(0, row_length)
        sequences = {"cu_seqlens": own}
    sums = [z_loss(routing, reduction="sum") for routing in routings]
    logits = reduce_from(torch.stack(sums), group=group).unbind()
    balance = [
        load_balance_loss(each, reduction="sum", group=group, **sequences) for each in routings
    ]
    return {
        name: [(total, num_tokens) for total in totals]
        for name, totals in (("load_balance", balance), ("z", logits))
    }


def counted_tokens(
    tokens_T: Tensor, cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None, missing: int
) -> Tensor | None:
    """True for tokens that are no pads [... T + missing]; ``None`` if there are none.

    Args:
        tokens_T: Ids [... T].
        cu_seqlens: Sums of the documents' lengths [E+1].
        cu_seqlens_padded: Where documents are stored, if pads lie between them [E+1].
        missing: How many pads follow.
    """
    if not missing and cu_seqlens_padded is None:
        return None
    count = tokens_T.shape[-1]
    index = torch.arange(count + missing, device=tokens_T.device)
    mask = index < count
    if cu_seqlens is not None and cu_seqlens_padded is not None:
        starts = cu_seqlens_padded.long()
        document = torch.searchsorted(starts, index, right=True) - 1
        lengths = nn.functional.pad(cu_seqlens.long().diff(), (0, 1))
        mask = mask & (index - starts[document] < lengths[document])
    return mask.expand(*tokens_T.shape[:-1], -1)


def _blank(
    build: Callable[..., nn.Module],
    *sizes: int,
    device: torch.device | str | None,
    **options: Any,
) -> nn.Module:
    """A module whose memory has no values: a model draws all of them at once, at the end."""
    where = torch.get_default_device() if device is None else device
    return build(*sizes, **options, device="meta").to_empty(device=where)
