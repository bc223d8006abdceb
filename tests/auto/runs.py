"""Tiny decoders, and training checkpoints of them."""

import torch
import torch.distributed as dist
import transformers

from megablocks_core import ckpt
from megablocks_core.groups import Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import DataParallel, MovingAverage, ShardedOptimizer, fully_shard

TOKENS = torch.arange(14).view(2, 7) * 5 % 30
_SIZES = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": {**_SIZES, "tie_word_embeddings": True},
    "mixtral": {**_SIZES, "num_local_experts": 4},
    "granitemoehybrid": {
        **_SIZES,
        "layers_block_type": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 4,
    },
    "nemotron_h": {
        **_SIZES,
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 24,
    },
}


def config_of(family):
    """What transformers writes of it, every default filled in."""
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    return config.to_dict()


def decoder_of(family, *, mesh=None, dtype=torch.float64):
    """One seed is one model at every layout."""
    torch.manual_seed(3)
    return Decoder(DecoderSpec.from_hf(config_of(family)), mesh=mesh, dtype=dtype)


def trained(family, layout, *, steps=1, dtype=torch.float64):
    """A decoder, its optimizer and its average after some steps on all ranks.

    Args:
        family: One of ``CONFIGS``.
        layout: Sizes of axes, and "fsdp" or "zero" with its stage.
        steps: How many.
        dtype: Of the weights.
    """
    axes = {axis: size for axis, size in layout.items() if axis in ("tp", "ep")}
    mesh = Mesh(**axes)
    model = decoder_of(family, mesh=mesh, dtype=dtype)
    ranks = {"group": mesh.group("dp"), "expert_group": mesh.expert.group("edp")}
    settings = {"lr": 1e-3}
    if layout.get("fsdp"):
        called = fully_shard(model, **ranks)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    elif zero := layout.get("zero"):
        called = model
        optimizer = ShardedOptimizer(model, torch.optim.AdamW, zero=zero, **ranks, **settings)
    else:
        called = DataParallel(model, **ranks)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    average = MovingAverage(model, 0.5)
    for _ in range(steps):
        called(TOKENS).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    return model, optimizer, average


def save(path, model, optimizer, average, *, group=None, **others):
    """A training checkpoint as a run would save it."""
    state = {"average": average, "optimizer": optimizer, "model": model, "step": 1}
    group = Mesh().group("dp") if group is None else group
    ckpt.save(path, state, group=group, files={"config.json": model.spec.to_hf()}, **others)


def is_first():
    return not dist.is_initialized() or dist.get_rank() == 0


def contents(folder):
    """Bytes by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
