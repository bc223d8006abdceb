"""Tiny transformers models, and folders that transformers saves of them."""

import torch
import torch.distributed as dist
import transformers
from torch import nn

TOKENS = torch.arange(12).view(2, 6) % 10
SIZES = {
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
}


def tiny_model(family="llama", dtype=torch.float32, **options):
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        family,
        **{**SIZES, **FAMILIES[family], **options},
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def pretrained(folder, family="llama", **options):
    """A transformers model saved by transformers; written by the first rank."""
    model = tiny_model(family, **options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return model


def assert_same(tensors, model):
    expected = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name in tensors or name != "lm_head.weight"
    }
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
