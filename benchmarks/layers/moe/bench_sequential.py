"""A whole mixture against Megatron-LM's, whose experts go one after the other.

Run it with the Python that ``tools/oracles.sh megatron`` prints: it has both. Routing is fixed.
Gradients are cleared by ``zero_grad()``; ours keep their memory.
"""

import tempfile
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu

from benchmarks.timing import report, take_turns
from megablocks_core.layers.moe import GroupedExperts, LocalDispatcher, MoE, TopKRouter

_NAME, _PEER = "layers/moe/sequential", "megatron-core MoELayer, SequentialMLP"
_TOKENS, _HIDDEN, _FFN, _TOP_K = 4096, 512, 1024, 2
# By (dtype, number of experts).
_LIMITS = {
    (torch.bfloat16, 8): 0.9,
    (torch.bfloat16, 64): 0.65,
    (torch.float32, 8): 0.95,
}


def bench(threads: int) -> None:
    """Each case of the table."""
    for (dtype, num_experts), limit in _LIMITS.items():
        theirs = _megatron(num_experts, dtype)
        ours = _ours(theirs, num_experts, dtype)
        x = torch.randn(_TOKENS, 1, _HIDDEN, dtype=dtype, requires_grad=True)
        _assert_alike(ours, theirs, x)
        times = take_turns(_step(ours, x), _step(theirs, x), rounds=9)
        case = {"experts": num_experts, "dtype": str(dtype), "routing": "fixed"}
        report(times, benchmark=_NAME, peer=_PEER, case=case, limit=limit, threads=threads)


def _megatron(num_experts: int, dtype: torch.dtype) -> Any:
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    config = import_module("megatron.core.transformer").TransformerConfig(
        num_layers=1,
        hidden_size=_HIDDEN,
        num_attention_heads=8,
        ffn_hidden_size=_FFN,
        moe_ffn_hidden_size=_FFN,
        num_moe_experts=num_experts,
        moe_router_topk=_TOP_K,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    layer = specs.get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False)
    torch.manual_seed(0)
    mixture = layer.submodules.mlp(config=config, layer_number=1)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return mixture.to(dtype)


def _ours(theirs: Any, num_experts: int, dtype: torch.dtype) -> MoE:
    layer = MoE(
        router=TopKRouter(_HIDDEN, num_experts=num_experts, top_k=_TOP_K, dtype=dtype),
        dispatcher=LocalDispatcher(),
        experts=GroupedExperts(num_experts, _HIDDEN, _FFN, dtype=dtype, persistent_gradients=True),
    )
    experts = theirs.experts.local_experts
    both = [expert.linear_fc1.weight.detach().chunk(2) for expert in experts]
    layer.load_state_dict(
        {
            "gate.weight": theirs.router.weight.detach().to(dtype),
            "experts.gate_proj": torch.stack([gate for gate, _ in both]),
            "experts.up_proj": torch.stack([up for _, up in both]),
            "experts.down_proj": torch.stack([e.linear_fc2.weight.detach() for e in experts]),
        }
    )
    return layer


def _assert_alike(ours: MoE, theirs: Any, x: Tensor) -> None:
    with torch.no_grad():
        mine, other = ours(x)[0], theirs(x)[0]
    # In bfloat16 they choose by logits that are rounded, and differ where two are near.
    off = (mine - other).norm(dim=-1) > 2e-2 * other.norm(dim=-1)
    assert off.float().mean() < (2e-2 if x.dtype == torch.bfloat16 else 1e-3)


def _step(layer: Any, x: Tensor) -> Any:
    dy = torch.randn_like(x)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x)[0].backward(dy)

    return step


def _without_cuda() -> None:
    """What megatron-core asks of a GPU, answered by the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    random = import_module("megatron.core.tensor_parallel.random")
    random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()


def main() -> None:
    """Print one JSON line a case."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=0, world_size=1)
        _without_cuda()
        import_module("megatron.core.parallel_state").initialize_model_parallel()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            bench(threads)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
