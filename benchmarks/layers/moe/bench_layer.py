"""A whole mixture against transformers' Mixtral block, in its grouped and its eager form.

A step is a forward and a backward pass: router, dispatch on one rank, experts and the sum. With
routing redrawn, tokens are other ones in each step, so that experts get other counts. Gradients are
cleared by ``zero_grad()``; ours keep their memory.
"""

from itertools import cycle

import torch
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from benchmarks.timing import Work, report, take_turns
from megablocks_core.layers.moe import GroupedExperts, LocalDispatcher, MoE, TopKRouter

_NAME = "layers/moe/layer"
_TOKENS, _HIDDEN, _FFN, _TOP_K = 4096, 512, 1024, 2
_DRAWS = 20
# By (dtype, number of experts, whether routing is redrawn, transformers' form).
_LIMITS = {
    (torch.bfloat16, 8, False, "grouped_mm"): 0.7,
    (torch.bfloat16, 8, False, "eager"): 0.55,
    (torch.float32, 8, False, "grouped_mm"): 0.85,
    (torch.float32, 8, False, "eager"): 0.75,
    (torch.bfloat16, 8, True, "grouped_mm"): 0.5,
    (torch.bfloat16, 64, True, "grouped_mm"): 0.5,
    (torch.bfloat16, 64, False, "grouped_mm"): 1.0,
}


def bench(threads: int) -> None:
    """Each case of the table."""
    for (dtype, num_experts, redrawn, form), limit in _LIMITS.items():
        theirs = _mixtral(num_experts, dtype, form)
        ours = _ours(theirs, dtype)
        draws = [
            torch.randn(1, _TOKENS, _HIDDEN, dtype=dtype, requires_grad=True)
            for _ in range(_DRAWS if redrawn else 1)
        ]
        _assert_alike(ours, theirs, draws[0])
        times = take_turns(_step(ours, draws), _step(theirs, draws), rounds=9)
        routing = "redrawn" if redrawn else "fixed"
        case = {"experts": num_experts, "dtype": str(dtype), "routing": routing}
        peer = f"transformers Mixtral, {form}"
        report(times, benchmark=_NAME, peer=peer, case=case, limit=limit, threads=threads)


def _mixtral(num_experts: int, dtype: torch.dtype, form: str) -> MixtralSparseMoeBlock:
    config = MixtralConfig(
        hidden_size=_HIDDEN,
        intermediate_size=_FFN,
        num_local_experts=num_experts,
        num_experts_per_tok=_TOP_K,
    )
    config._experts_implementation = form
    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return block.to(dtype)


def _ours(theirs: MixtralSparseMoeBlock, dtype: torch.dtype) -> MoE:
    both = theirs.state_dict()
    num_experts = len(both["gate.weight"])
    layer = MoE(
        router=TopKRouter(_HIDDEN, num_experts=num_experts, top_k=_TOP_K, dtype=dtype),
        dispatcher=LocalDispatcher(),
        experts=GroupedExperts(num_experts, _HIDDEN, _FFN, dtype=dtype, persistent_gradients=True),
    )
    gate, up = both["experts.gate_up_proj"].chunk(2, dim=1)
    weights = {
        "gate.weight": both["gate.weight"],
        "experts.gate_proj": gate,
        "experts.up_proj": up,
        "experts.down_proj": both["experts.down_proj"],
    }
    layer.load_state_dict({name: weight.clone() for name, weight in weights.items()})
    return layer


def _assert_alike(ours: MoE, theirs: MixtralSparseMoeBlock, x: Tensor) -> None:
    with torch.no_grad():
        mine, other = ours(x)[0], theirs(x)
    # In bfloat16 they choose by logits that are rounded, and differ where two are near.
    off = (mine - other).norm(dim=-1) > 2e-2 * other.norm(dim=-1)
    assert off.float().mean() < (2e-2 if x.dtype == torch.bfloat16 else 1e-3)


def _step(layer: nn.Module, draws: list[Tensor]) -> Work:
    turns, dy = cycle(draws), torch.randn_like(draws[0])

    def step() -> None:
        layer.zero_grad()
        x = next(turns)
        x.grad = None
        output = layer(x)  # ours gives the routing too
        y = output[0] if isinstance(output, tuple) else output
        y.backward(dy)

    return step


def main() -> None:
    """Print one JSON line a case."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        bench(threads)


if __name__ == "__main__":
    main()
