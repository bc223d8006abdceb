"""Have megatron-core save small GPT models: a program, run once for each rank.

    megatron_save.py FOLDER RANK RANKS FAMILY...

writes a ``torch_dist`` checkpoint FOLDER/FAMILY of each, and beside it FAMILY.logits, what the
model says of ``TOKENS``.
"""

import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import silu

TOKENS = torch.arange(12).view(1, 12) * 7 % 30
HEADS, GROUPS, HIDDEN, LAYERS, VOCAB, PADDED, EXPERTS = 4, 2, 32, 2, 30, 32, 4


def main(folder, rank, num_ranks, *families):
    folder, rank, num_ranks = Path(folder), int(rank), int(num_ranks)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    without_cuda()
    import_module("megatron.core.parallel_state").initialize_model_parallel(num_ranks)
    save = import_module("megatron.core.dist_checkpointing").save
    future = torch.ones(1, 1, 12, 12).triu(1).bool()
    for family in families:
        model = build(family, num_ranks)
        (folder / family).mkdir(exist_ok=True)
        state = {**model.sharded_state_dict(), "iteration": 5}
        save(state, str(folder / family))
        with torch.no_grad():
            logits = model(TOKENS, torch.arange(12).view(1, 12), future).contiguous()
        parts = [torch.empty_like(logits) for _ in range(num_ranks)]
        dist.all_gather(parts, logits)
        if rank == 0:
            torch.save(torch.cat(parts, -1)[..., :VOCAB], folder / f"{family}.logits")
    dist.destroy_process_group()


def without_cuda():
    """What megatron-core asks of a GPU, answered by the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    random = import_module("megatron.core.tensor_parallel.random")
    random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()


def build(family, num_ranks):
    gpt = import_module("megatron.core.models.gpt")
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    moe = {}
    if family in ("mixtral", "qwen3_moe"):
        moe = {
            "num_moe_experts": EXPERTS,
            "moe_ffn_hidden_size": 24,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "allgather",
        }
    torch.manual_seed(0)
    config = import_module("megatron.core.transformer").TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=48,
        use_cpu_initialization=True,
        init_method_std=0.3,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=family == "qwen2",
        qk_layernorm=family.startswith("qwen3"),
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        tensor_model_parallel_size=num_ranks,
        **moe,
    )
    spec = specs.get_gpt_layer_local_spec(
        num_experts=EXPERTS if moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=family.startswith("qwen3"),
        normalization="RMSNorm",
    )
    model = gpt.GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms are ones and biases zeros, which say nothing
                generator = torch.Generator().manual_seed(len(name))
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
