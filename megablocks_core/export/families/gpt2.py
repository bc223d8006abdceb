"""GPT-2: learned positions, layer norms with biases, matrices the other way round, a tied head.

On disk a projection is [in out] and queries, keys and values are the columns of one. Ours are apart
and [out in], with the names of Llama's parts where there are such. transformers writes
"transformer." before all names but the head's; the files that were published first do not have it.
"""

from __future__ import annotations

from megablocks_core.export.families.weights import (
    Config,
    Family,
    Sizes,
    Weight,
    split,
    transpose,
)

_LAYER, _OURS = "transformer.h.{}", "model.layers.{}"
_QKV = tuple(f"{_OURS}.self_attn.{name}_proj" for name in "qkv")
# Projections that are one on either side: their name, ours, and their shape.
_PROJECTIONS = (
    ("attn.c_proj", "self_attn.o_proj", "hidden", "hidden"),
    ("mlp.c_fc", "mlp.up_proj", "hidden", "ffn"),
    ("mlp.c_proj", "mlp.down_proj", "ffn", "hidden"),
)
_NORMS = {
    f"{_LAYER}.ln_1": f"{_OURS}.input_layernorm",
    f"{_LAYER}.ln_2": f"{_OURS}.post_attention_layernorm",
    "transformer.ln_f": "model.norm",
}


def _sizes(config: Config) -> Sizes:
    hidden = config["n_embd"]
    return {
        "vocab": config["vocab_size"],
        "positions": config["n_positions"],
        "hidden": hidden,
        "qkv": 3 * hidden,
        "ffn": config.get("n_inner", 4 * hidden),
    }


def _kinds(config: Config) -> list[str]:
    return [""] * config["n_layer"]


def _in_others_words(config: Config) -> Config:
    """Refuse what no table here describes."""
    if config.get("add_cross_attention"):
        raise ValueError("add_cross_attention=True must be False: only decoders alone are served")
    return config


def _projections() -> tuple[Weight, ...]:
    return tuple(
        weight
        for theirs, ours, inner, outer in _PROJECTIONS
        for weight in (
            Weight(
                f"{_LAYER}.{theirs}.weight",
                f"{inner} {outer}",
                ours=f"{_OURS}.{ours}.weight",
                steps=(transpose(),),
            ),
            Weight(f"{_LAYER}.{theirs}.bias", outer, ours=f"{_OURS}.{ours}.bias"),
        )
    )


def _norms() -> tuple[Weight, ...]:
    return tuple(
        Weight(f"{theirs}.{part}", "hidden", ours=f"{ours}.{part}")
        for theirs, ours in _NORMS.items()
        for part in ("weight", "bias")
    )


GPT2_FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        (
            Weight("transformer.wte.weight", "vocab hidden", ours="model.embed_tokens.weight"),
            Weight("transformer.wpe.weight", "positions hidden", ours="model.positions.weight"),
            Weight(
                f"{_LAYER}.attn.c_attn.weight",
                "hidden qkv",
                ours=tuple(f"{name}.weight" for name in _QKV),
                steps=(transpose(), split("hidden hidden hidden")),
            ),
            Weight(
                f"{_LAYER}.attn.c_attn.bias",
                "qkv",
                ours=tuple(f"{name}.bias" for name in _QKV),
                steps=(split("hidden hidden hidden"),),
            ),
            *_projections(),
            *_norms(),
            Weight("lm_head.weight", "vocab hidden"),
        ),
        _sizes,
        _kinds,
        ("vocab_size", "n_positions", "n_embd", "n_layer"),
        {"tie_word_embeddings": True},
        ignored=(f"{_LAYER}.attn.bias", f"{_LAYER}.attn.masked_bias"),
        prefix="transformer.",
        in_others_words=_in_others_words,
    )
}
