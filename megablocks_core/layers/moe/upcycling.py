"""From a dense feed-forward layer to a mixture of experts that starts as the same function.

Komatsuzaki et al., https://arxiv.org/abs/2212.05055; with finer experts: He et al.,
https://arxiv.org/abs/2410.07524, section 3.

Dimensions: E experts, G parts of the dense layer, F its features, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups import gather_whole, load_whole
from megablocks_core.layers.moe.moe import MoE
from megablocks_core.layers.moe.routers import TopKRouter
from megablocks_core.parallel.checks import check_whole


@torch.no_grad()
def upcycle(dense: nn.Module, moe: MoE, *, granularity: int = 1) -> None:
    """Fill ``moe``, at any layout, so that it gives what ``dense`` gives.

    The F features of ``dense`` are cut into G parts, and expert ``c G + g`` is copy c of part g.
    The router keeps its rows ``c G`` and repeats each for the G experts of a copy, and its
    selection bias becomes zero: these tie, so that a token takes all parts of ``top_k / G`` copies.
    Each expert's ``down_proj`` is that of its part times ``G / s``, where ``s`` is the sum of a
    token's weights: the router's ``scale``.
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
        ValueError: G does not divide F, the experts or ``top_k``, sizes, activations or biases
            differ, the router is no ``TopKRouter``, weights do not add up to one number or weigh
            inputs, groups or a capacity limit the choice, or ``moe`` adds more than its routed
            experts.
    """
    whole = gather_whole(dense)
    router, experts = moe.gate, moe.experts
    _check(moe, whole, granularity)
    _check_activation(dense, moe)
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
    if router.e_score_correction_bias is not None:
        router.e_score_correction_bias.zero_()  # so that the parts of a copy tie
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
    check_whole("granularity", granularity, least=1)
    _check_router(router)
    if "down_proj.weight" not in whole:
        raise ValueError(f"dense must have a down_proj, not only {sorted(whole)}")
    hidden, features = whole["down_proj.weight"].shape
    counts = {
        "the dense layer's features": features,
        "num_experts": experts.num_experts,
        "top_k": router.top_k,
    }
    for name, count in counts.items():
        if count % granularity:
            raise ValueError(f"granularity={granularity} must divide {name}: {count}")
    if (experts.hidden_size, experts.ffn_size) != (hidden, features // granularity):
        raise ValueError(
            f"experts of hidden_size={experts.hidden_size} and ffn_size={experts.ffn_size} must "
            f"have {hidden} and {features // granularity}"
        )
    if experts.weigh == "input":
        raise ValueError('weigh="input" must be "hidden" or "output": parts add up after them')
    for name in ("shared_experts", "fc1_latent_proj", "zero_computation"):
        if getattr(moe, name) is not None:
            raise ValueError(f"{name} of moe must be None: only routed experts are filled")
    own = {name for name, _ in experts.named_parameters(recurse=False)}
    given = {name.replace(".weight", "").replace("_proj.bias", "_bias") for name in whole}
    if own != given:
        raise ValueError(f"dense must have what the experts have: {sorted(own)}, not {given}")


def _check_router(router: nn.Module) -> None:
    """Raise unless weights add up to one number and nothing parts what ties."""
    if not isinstance(router, TopKRouter):
        raise ValueError(f"router={router} must be a TopKRouter")
    if router.renormalize is not True and router.renormalize != 1:
        raise ValueError(
            f"renormalize={router.renormalize} must be True: weights add up to one number then"
        )
    for name in ("groups", "capacity"):
        limit = getattr(router, name)
        if limit is not None:
            raise ValueError(f"{name}={limit} must be None: a token takes all parts of a copy")


def _check_activation(dense: nn.Module, moe: MoE) -> None:
    """Compare the two on a few values: they may be called by other names."""
    theirs: Any = getattr(dense, "activation", None)
    ours = moe.experts.formula.activation
    if not callable(theirs):
        return
    probe = torch.linspace(-3, 3, 13, dtype=torch.float64)
    gate, up = (probe, torch.ones_like(probe)) if ours.gated else (None, probe)
    found: Any = theirs(probe)
    if not torch.allclose(found, ours.forward(gate, up)):
        raise ValueError(f"activation={moe.experts.activation!r} of moe must be that of dense")
