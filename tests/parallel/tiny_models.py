"""Tiny random transformers models in float64, exact to the last place.

transformers rounds to float32 inside its norms and its router even in a float64 model, which
turns differences of the last place into differences of 1e-8. Here these modules compute in
the dtype of their input, so that a cut model can be held to 1e-10. ``Grouped`` is attention of a
model of one's own.
"""

import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megablocks_core.parallel import Column

KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    ),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    # Both gather the features inside attention: packed projections, norms over all heads.
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
}


def tiny_model(kind, *, num_key_value_heads=4, tied=False, exact=True, **options):
    """A model of two layers, four heads and 101 tokens; the generator is the caller's."""
    model_class, config_class, more = KINDS[kind]
    config = config_class(
        **{
            "vocab_size": 101,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": num_key_value_heads,
            "max_position_embeddings": 64,
            "tie_word_embeddings": tied,
            "pad_token_id": 0,
            **more,
            **options,
        }
    )
    config._experts_implementation = "eager"  # the grouped product has no float64
    model = model_class(config).double()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "layernorm.weight")):
            nn.init.normal_(parameter, mean=0.0 if kind == "gemma3" else 1.0, std=0.1)
    if exact:
        make_exact(model)
    return model


def make_exact(model):
    """Let norms and routers compute in the dtype of their input."""
    for part in model.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = _Norm(part)
        elif type(part).__name__.endswith("TopKRouter"):
            part.forward = _Router(part)


class _Norm:
    def __init__(self, part):
        self.part = part

    def __call__(self, x):
        eps = getattr(self.part, "variance_epsilon", None) or self.part.eps
        offset = 1.0 if type(self.part).__name__.startswith("Gemma") else 0.0
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + self.part.weight)
        )


class _Router:
    """Mixtral's: softmax, top-k, renormalised."""

    def __init__(self, part):
        self.part = part

    def __call__(self, x):
        logits = nn.functional.linear(x, self.part.weight)
        top, index = torch.topk(logits.softmax(-1), self.part.top_k, dim=-1)
        return logits, top / top.sum(-1, keepdim=True), index


class Grouped(nn.Module):
    """Attention of Llama's kind in a model of one's own: two key heads for four query heads."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.num_key_value_groups = 4, 2
        self.q_proj, self.o_proj = nn.Linear(8, 16), nn.Linear(16, 8)
        self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        projections = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(-2, -3) for y in projections)
        k, v = (y.repeat_interleave(self.num_key_value_groups, dim=-3) for y in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(y.transpose(-2, -3).flatten(-2))


GROUPED_PLAN = {
    "q_proj": "column",
    "k_proj": Column(repeat=True),
    "v_proj": Column(repeat=True),
    "o_proj": "row",
}
