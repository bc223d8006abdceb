"""Have megatron-core save small GPT models: a program, run once for each rank.

    megatron_save.py FOLDER RANK TP,PP,EP FAMILY...

writes a ``torch_dist`` checkpoint FOLDER/FAMILY-FORM of each in both forms, and beside it
FAMILY.logits, what the model says of ``TOKENS``.
"""

import sys
import zlib
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import silu

TOKENS = torch.arange(12).view(1, 12) * 7 % 30
HEADS, GROUPS, HIDDEN, LAYERS, VOCAB, PADDED, EXPERTS = 4, 2, 32, 4, 30, 32, 4
# Layers and experts stacked, or each a tensor of its own with gate and up apart.
FORMS = {"stacked": None, "apart": {"singleton_local_shards": True}}


def main(folder, rank, layout, *families):
    folder, rank = Path(folder), int(rank)
    tp, pp, ep = map(int, layout.split(","))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=tp * pp * ep
    )
    without_cuda()
    state = import_module("megatron.core.parallel_state")
    state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp
    )
    save = import_module("megatron.core.dist_checkpointing").save
    for family in families:
        model = build(family, state)
        for form, metadata in FORMS.items():
            path = folder / f"{family}-{form}"
            path.mkdir(exist_ok=True)
            save({**model.sharded_state_dict(metadata=metadata), "iteration": 5}, str(path))
        logits = run(model, state)
        if logits is not None:
            torch.save(logits, folder / f"{family}.logits")
    dist.destroy_process_group()


def run(model, state):
    """What the model says of ``TOKENS``; on one rank of the last stage, ``None`` on others."""
    stages = state.get_pipeline_model_parallel_group()
    future = torch.ones(1, 1, 12, 12).triu(1).bool()
    if not state.is_pipeline_first_stage():
        model.set_input_tensor(torch.empty(12, 1, HIDDEN))
        dist.recv(model.decoder.input_tensor, group=stages, group_src=stages.rank() - 1)
    with torch.no_grad():
        out = model(TOKENS, torch.arange(12).view(1, 12), future).contiguous()
    if not state.is_pipeline_last_stage():
        dist.send(out, group=stages, group_dst=stages.rank() + 1)
        return None
    tp = state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(out) for _ in range(tp.size())]
    dist.all_gather(parts, out, group=tp)
    is_first = (tp.rank(), state.get_data_parallel_rank()) == (0, 0)
    return torch.cat(parts, -1)[..., :VOCAB] if is_first else None


def without_cuda():
    """What megatron-core asks of a GPU, answered by the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    random = import_module("megatron.core.tensor_parallel.random")
    random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()


def build(family, state):
    gpt = import_module("megatron.core.models.gpt")
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    moe = {}
    if family in ("mixtral", "qwen3_moe"):
        moe = {
            "num_moe_experts": EXPERTS,
            "moe_ffn_hidden_size": 24,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": state.get_expert_tensor_parallel_world_size(),
        }
    stage = state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage)
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
        tensor_model_parallel_size=state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
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
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
    ).eval()
    expert_ranks = (
        state.get_expert_model_parallel_rank(),
        state.get_expert_tensor_parallel_rank(),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms are ones and biases zeros, and experts are drawn alike: that says nothing.
            if parameter.dim() == 1 or "experts" in name:
                place = (name, stage, expert_ranks if "experts" in name else ())
                generator = torch.Generator().manual_seed(zlib.crc32(repr(place).encode()))
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
