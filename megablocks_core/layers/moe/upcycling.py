"""From a dense feed-forward layer to a mixture of experts that starts as the same function.

Komatsuzaki et al., https://arxiv.org/abs/2212.05055; with finer experts: He et al.,
https://arxiv.org/abs/2410.07524, section 3.

Dimensions: E experts, G parts of the dense layer, F its features, H hidden size.
"""

import torch
from torch import Tensor, nn

from megablocks_core.groups import gather_whole, load_whole
from megablocks_core.layers.moe.moe import MoE


@torch.no_grad()
def upcycle(dense: nn.Module, moe: MoE, *, granularity: int = 1) -> None:
    """Fill ``moe``, at any layout, so that it gives what ``dense`` gives.

    The F features of ``dense`` are cut into G parts, and expert ``c G + g`` is copy c of part g.
    The router keeps its rows ``c G`` and repeats each for the G experts of a copy: these tie, so
    that a token takes all parts of ``top_k / G`` copies. Each expert's ``down_proj`` is that of
    its part times ``G / s``, where ``s`` is the sum of a token's weights: the router's ``scale``.
    So the output is that of ``dense`` but for rounding; it is the same to the bit in every product
    where ``G / s`` is a power of two. A bias of ``down_proj`` is scaled by ``1 / s`` alone.

    Every rank must call it; it sends what ``gather_whole(dense)`` sends.

    Args:
        dense: A layer with projections ``gate_proj`` (unless it has no gate), ``up_proj`` and
            ``down_proj``, such as ``GatedMLP``, with the activation of the experts.
        moe: Its experts have F / G features, and its router weights that add up to one number
            for each token.
        granularity: G.

    Raises:
        ValueError: G does not divide F, the experts or ``top_k``, sizes or biases differ, weights
            do not add up to one number, groups limit the choice, or ``moe`` adds more than its
            routed experts.
    """
    whole = gather_whole(dense)
    router, experts = moe.gate, moe.experts
    _check(moe, whole, granularity)
    number: int = experts.num_experts
    scale = float(router.scale)
    parts = {name: _parts(name, tensor, granularity, scale) for name, tensor in whole.items()}
    load_whole(
        moe,
        {
            f"experts.{expert}.{name}": pieces[expert % granularity]
            for name, pieces in parts.items()
            for expert in range(number)
        },
        strict=False,
    )
    for values in (router.weight, router.bias):
        if values is not None:
            first: Tensor = values[::granularity]
            values.copy_(first.repeat_interleave(granularity, 0))


def _parts(name: str, tensor: Tensor, granularity: int, scale: float) -> list[Tensor]:
    if name == "down_proj.bias":
        return [tensor / scale] * granularity
    if name == "down_proj.weight":
        return [part * (granularity / scale) for part in tensor.chunk(granularity, 1)]
    return list(tensor.chunk(granularity, 0))


def _check(moe: MoE, whole: dict[str, Tensor], granularity: int) -> None:
    router, experts = moe.gate, moe.experts
    if "down_proj.weight" not in whole:
        raise ValueError(f"dense must have a down_proj, not only {sorted(whole)}")
    hidden, features = whole["down_proj.weight"].shape
    counts = {
        "the dense layer's features": features,
        "num_experts": experts.num_experts,
        "top_k": router.top_k,
    }
    for name, count in counts.items():
        if granularity < 1 or count % granularity:
            raise ValueError(f"granularity={granularity} must divide {name}: {count}")
    if (experts.hidden_size, experts.ffn_size) != (hidden, features // granularity):
        raise ValueError(
            f"experts of hidden_size={experts.hidden_size} and ffn_size={experts.ffn_size} must "
            f"have {hidden} and {features // granularity}"
        )
    if router.renormalize is not True and router.renormalize != 1:
        raise ValueError(
            f"renormalize={router.renormalize} must be True: weights add up to one number then"
        )
    if router.groups is not None:
        raise ValueError(f"groups={router.groups} must be None: a token takes all parts of a copy")
    for name in ("shared_experts", "fc1_latent_proj", "zero_computation"):
        if getattr(moe, name) is not None:
            raise ValueError(f"{name} of moe must be None: only routed experts are filled")
    own = {name for name, _ in experts.named_parameters(recurse=False)}
    given = {name.replace(".weight", "").replace("_proj.bias", "_bias") for name in whole}
    if own != given:
        raise ValueError(f"dense must have what the experts have: {sorted(own)}, not {given}")
