"""Families with state-space blocks: one mixer a layer, or a mixer and a feed-forward layer.

Our models have one mixer a block, called ``model.layers.{}.norm`` and ``model.layers.{}.mixer``.
"""

from __future__ import annotations

from collections.abc import Sequence

from megablocks_core.export.families.in_memory import fused_experts
from megablocks_core.export.families.weights import (
    Config,
    Family,
    Sizes,
    Weight,
    split,
    unstack,
)

MAMBA, ATTENTION, FEED_FORWARD, EXPERTS = "M", "*", "-", "E"
_LETTERS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": FEED_FORWARD,
    "moe": EXPERTS,
}
_BLOCK = "model.layers.{}"
_MIXER = f"{_BLOCK}.mixer"


def _frame(embedding: str, norms: Sequence[str], last: str) -> tuple[Weight, ...]:
    """What stands around the blocks, and the norms of a layer's blocks."""
    return (
        Weight(embedding, "vocab hidden", ours="model.embed_tokens.weight"),
        *(
            Weight(norm, "hidden", ours=f"{_BLOCK}.norm.weight", block=block)
            for block, norm in enumerate(norms)
        ),
        Weight(last, "hidden", ours="model.norm.weight"),
        Weight("lm_head.weight", "vocab hidden"),
    )


def _mixer(
    theirs: str, shapes: dict[str, str], *, kind: str, when: str | None = None, block: int = 0
) -> tuple[Weight, ...]:
    """Weights that have our names inside of a mixer that they call ``theirs``."""
    return tuple(
        Weight(f"{theirs}.{name}", shape, when, ours=f"{_MIXER}.{name}", kind=kind, block=block)
        for name, shape in shapes.items()
    )


def _mamba1(theirs: str) -> tuple[Weight, ...]:
    shapes = {
        "A_log": "inner state",
        "D": "inner",
        "in_proj.weight": "projected hidden",
        "conv1d.weight": "channels 1 kernel",
        "x_proj.weight": "steps inner",
        "dt_proj.weight": "inner rank",
        "dt_proj.bias": "inner",
        "out_proj.weight": "hidden inner",
    }
    return (
        *_mixer(theirs, shapes, kind=MAMBA),
        *_mamba_biases(theirs, "use_bias", "use_conv_bias"),
    )


def _mamba2(theirs: str, bias: str, conv_bias: str) -> tuple[Weight, ...]:
    shapes = {
        "A_log": "mamba_heads",
        "D": "mamba_heads",
        "dt_bias": "mamba_heads",
        "in_proj.weight": "projected hidden",
        "conv1d.weight": "channels 1 kernel",
        "norm.weight": "inner",
        "out_proj.weight": "hidden inner",
    }
    return (*_mixer(theirs, shapes, kind=MAMBA), *_mamba_biases(theirs, bias, conv_bias))


def _mamba_biases(theirs: str, bias: str, conv_bias: str) -> tuple[Weight, ...]:
    projections = {"in_proj.bias": "projected", "out_proj.bias": "hidden"}
    return (
        *_mixer(theirs, projections, kind=MAMBA, when=bias),
        *_mixer(theirs, {"conv1d.bias": "channels"}, kind=MAMBA, when=conv_bias),
    )


def _attention(theirs: str, bias: str | None) -> tuple[Weight, ...]:
    sizes = {"q_proj": "q", "k_proj": "kv", "v_proj": "kv"}
    shapes = {f"{name}.weight": f"{size} hidden" for name, size in sizes.items()}
    biases = {f"{name}.bias": size for name, size in sizes.items()} | {"o_proj.bias": "hidden"}
    return (
        *_mixer(theirs, {**shapes, "o_proj.weight": "hidden q"}, kind=ATTENTION),
        *(_mixer(theirs, biases, kind=ATTENTION, when=bias) if bias else ()),
    )


def _mlp(
    theirs: str,
    *,
    width: str = "ffn",
    kind: str = FEED_FORWARD,
    gated: bool,
    bias: bool,
    block: int,
) -> tuple[Weight, ...]:
    inner = ("gate_proj", "up_proj") if gated else ("up_proj",)
    shapes = {f"{name}.weight": f"{width} hidden" for name in inner}
    biases = {f"{name}.bias": width for name in inner} | {"down_proj.bias": "hidden"}
    words = {"kind": kind, "block": block}
    return (
        *_mixer(theirs, {**shapes, "down_proj.weight": f"hidden {width}"}, **words),
        *(_mixer(theirs, biases, when="mlp_bias", **words) if bias else ()),
    )


def _nemotron_experts(theirs: str) -> tuple[Weight, ...]:
    shapes = {
        "gate.weight": "experts hidden",
        "gate.e_score_correction_bias": "experts",
        "experts.{}.up_proj.weight": "expert latent",
        "experts.{}.down_proj.weight": "latent expert",
        "shared_experts.up_proj.weight": "shared hidden",
        "shared_experts.down_proj.weight": "hidden shared",
    }
    biases = {"shared_experts.up_proj.bias": "shared", "shared_experts.down_proj.bias": "hidden"}
    # Experts of some models work on fewer features than the residual stream has.
    latent = {"fc1_latent_proj.weight": "latent hidden", "fc2_latent_proj.weight": "hidden latent"}
    of_latent = {"fc1_latent_proj.bias": "latent", "fc2_latent_proj.bias": "hidden"}
    return (
        *_mixer(theirs, shapes, kind=EXPERTS),
        *_mixer(theirs, biases, kind=EXPERTS, when="mlp_bias"),
        *_mixer(theirs, latent, kind=EXPERTS, when="moe_latent_size"),
        *_mixer(theirs, of_latent, kind=EXPERTS, when="moe_latent_size and mlp_bias"),
    )


def _granite_feed_forward() -> tuple[Weight, ...]:
    """Gate and up are one tensor on disk, and those of all experts are."""
    layer, experts = "model.layers.{}", f"{_MIXER}.experts.{{}}"

    def shared(kind: str, ours: str) -> tuple[Weight, ...]:
        gate_up = (f"{ours}.gate_proj.weight", f"{ours}.up_proj.weight")
        down = f"{ours}.down_proj.weight"
        theirs = f"{layer}.shared_mlp"
        return (
            Weight(
                f"{theirs}.input_linear.weight",
                "gate_up hidden",
                ours=gate_up,
                kind=kind,
                block=1,
                steps=(split("ffn ffn"),),
            ),
            Weight(f"{theirs}.output_linear.weight", "hidden ffn", ours=down, kind=kind, block=1),
        )

    theirs = f"{layer}.block_sparse_moe"
    gate_up = (f"{experts}.gate_proj.weight", f"{experts}.up_proj.weight")
    return (
        *shared(FEED_FORWARD, _MIXER),
        *shared(EXPERTS, f"{_MIXER}.shared_experts"),
        Weight(
            f"{theirs}.router.layer.weight",
            "experts hidden",
            ours=f"{_MIXER}.gate.weight",
            kind=EXPERTS,
            block=1,
        ),
        Weight(
            f"{theirs}.input_linear.weight",
            "experts expert_gate_up hidden",
            ours=gate_up,
            kind=EXPERTS,
            block=1,
            steps=(split("expert expert", dim=1), unstack()),
        ),
        Weight(
            f"{theirs}.output_linear.weight",
            "experts hidden expert",
            ours=f"{experts}.down_proj.weight",
            kind=EXPERTS,
            block=1,
            steps=(unstack(),),
        ),
    )


def _granite_in_memory() -> tuple[Weight, ...]:
    """The names alone are others."""
    theirs = f"{_BLOCK}.block_sparse_moe"
    return tuple(
        Weight(f"{theirs}.{name}", shape, ours=f"{theirs}.{on_disk}.weight", kind=EXPERTS)
        for name, shape, on_disk in (
            ("router.weight", "experts hidden", "router.layer"),
            ("experts.gate_up_proj", "experts expert_gate_up hidden", "input_linear"),
            ("experts.down_proj", "experts hidden expert", "output_linear"),
        )
    )


def _nemotron_in_memory() -> tuple[Weight, ...]:
    """Names begin with our ``model``, and experts are stacked."""
    frame = {"embeddings": "vocab hidden", "norm_f": "hidden"}
    return (
        *(
            Weight(f"model.{name}.weight", shape, ours=f"backbone.{name}.weight")
            for name, shape in frame.items()
        ),
        *fused_experts(
            _MIXER,
            on_disk=_THEIRS,
            names={"up": "up_proj", "down": "down_proj"},
            kind=EXPERTS,
            width="latent",
        ),
    )


def _mamba1_sizes(config: Config) -> Sizes:
    hidden = config["hidden_size"]
    inner = config.get("intermediate_size", int(config["expand"] * hidden))
    rank = config["time_step_rank"]
    rank = -(-hidden // 16) if rank == "auto" else rank
    return {
        "vocab": config["vocab_size"],
        "hidden": hidden,
        "inner": inner,
        "channels": inner,
        "projected": 2 * inner,
        "state": config["state_size"],
        "kernel": config["conv_kernel"],
        "rank": rank,
        "steps": rank + 2 * config["state_size"],
    }


def _mamba2_sizes(config: Config, heads: str, width: str, state: str, groups: str) -> Sizes:
    hidden, count = config["hidden_size"], config[heads]
    head = config.get(width, "auto")
    if head == "auto":
        head = config["mamba_expand"] * hidden // count
    inner, shared = count * head, config[groups] * config[state]
    return {
        "vocab": config["vocab_size"],
        "hidden": hidden,
        "inner": inner,
        "mamba_heads": count,
        "channels": inner + 2 * shared,
        "projected": 2 * inner + 2 * shared + count,
        "kernel": config.get("conv_kernel", config.get("mamba_d_conv")),
    }


def _plain_mamba2_sizes(config: Config) -> Sizes:
    return _mamba2_sizes(config, "num_heads", "head_dim", "state_size", "n_groups")


def _attention_sizes(config: Config) -> Sizes:
    heads = config["num_attention_heads"]
    head = config.get("head_dim", config["hidden_size"] // heads)
    return {"q": heads * head, "kv": config.get("num_key_value_heads", heads) * head}


def _nemotron_sizes(config: Config) -> Sizes:
    names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups")
    return {
        **_mamba2_sizes(config, *names),
        **_attention_sizes(config),
        "ffn": config["intermediate_size"],
        "experts": config["n_routed_experts"],
        "expert": config["moe_intermediate_size"],
        "shared": config["moe_shared_expert_intermediate_size"],
        "latent": config.get("moe_latent_size", config["hidden_size"]),
    }


def _bamba_sizes(config: Config) -> Sizes:
    names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups")
    ffn = config.get("shared_intermediate_size", config["intermediate_size"])
    expert = config["intermediate_size"]
    return {
        **_mamba2_sizes(config, *names),
        **_attention_sizes(config),
        "ffn": ffn,
        "gate_up": 2 * ffn,
        "experts": config.get("num_local_experts", 0),
        "expert": expert,
        "expert_gate_up": 2 * expert,
    }


def _all_mamba(config: Config) -> list[str]:
    return [MAMBA] * config["num_hidden_layers"]


def _singles(config: Config) -> list[str]:
    names = config.get("layers_block_type", config.get("layer_types"))
    if names is not None:
        return [_LETTERS[name] for name in names]
    return list(config["hybrid_override_pattern"])


def _pairs(config: Config) -> list[str]:
    second = EXPERTS if config.get("num_local_experts") else FEED_FORWARD
    names = config.get("layers_block_type", config.get("layer_types"))
    count, places = config["num_hidden_layers"], config.get("attn_layer_indices", ())
    if names is None:
        names = ["attention" if n in places else "mamba" for n in range(count)]
    return [_LETTERS[name] + second for name in names]


_BAMBA_DEFAULTS = {
    "num_attention_heads": 32,
    "mamba_n_heads": 128,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_MAMBA_DEFAULTS = {"expand": 2, "conv_kernel": 4, "use_conv_bias": True}
_BACKBONE = _frame(
    "backbone.embeddings.weight", ["backbone.layers.{}.norm.weight"], "backbone.norm_f.weight"
)
_THEIRS = "backbone.layers.{}.mixer"
_LAYER = "model.layers.{}"

HYBRID_FAMILIES = {
    "mamba": Family(
        "MambaForCausalLM",
        (*_BACKBONE, *_mamba1(_THEIRS)),
        _mamba1_sizes,
        _all_mamba,
        ("vocab_size", "hidden_size", "num_hidden_layers"),
        {
            **_MAMBA_DEFAULTS,
            "state_size": 16,
            "time_step_rank": "auto",
            "tie_word_embeddings": True,
        },
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        (*_BACKBONE, *_mamba2(_THEIRS, "use_bias", "use_conv_bias")),
        _plain_mamba2_sizes,
        _all_mamba,
        ("vocab_size", "hidden_size", "num_hidden_layers"),
        {**_MAMBA_DEFAULTS, "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8},
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        (
            *_BACKBONE,
            *_mamba2(_THEIRS, "use_bias", "use_conv_bias"),
            *_attention(_THEIRS, None),
            *_mlp(_THEIRS, gated=False, bias=True, block=0),
            *_nemotron_experts(_THEIRS),
        ),
        _nemotron_sizes,
        _singles,
        ("vocab_size", "hidden_size"),
        {
            **_MAMBA_DEFAULTS,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "n_routed_experts": 8,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
        },
        in_memory=_nemotron_in_memory(),
    ),
    "bamba": Family(
        "BambaForCausalLM",
        (
            *_frame(
                "model.embed_tokens.weight",
                [f"{_LAYER}.input_layernorm.weight", f"{_LAYER}.pre_ff_layernorm.weight"],
                "model.final_layernorm.weight",
            ),
            *_mamba2(f"{_LAYER}.mamba", "mamba_proj_bias", "mamba_conv_bias"),
            *_attention(f"{_LAYER}.self_attn", "attention_bias"),
            *_mlp(f"{_LAYER}.feed_forward", gated=True, bias=True, block=1),
        ),
        _bamba_sizes,
        _pairs,
        ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        {**_BAMBA_DEFAULTS, "num_key_value_heads": 8},
        blocks=2,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        (
            *_frame(
                "model.embed_tokens.weight",
                [f"{_LAYER}.input_layernorm.weight", f"{_LAYER}.post_attention_layernorm.weight"],
                "model.norm.weight",
            ),
            *_mamba2(f"{_LAYER}.mamba", "mamba_proj_bias", "mamba_conv_bias"),
            *_attention(f"{_LAYER}.self_attn", "attention_bias"),
            *_granite_feed_forward(),
        ),
        _bamba_sizes,
        _pairs,
        ("vocab_size", "hidden_size", "num_hidden_layers"),
        {
            **_BAMBA_DEFAULTS,
            "intermediate_size": 11008,
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
        },
        blocks=2,
        in_memory=_granite_in_memory(),
    ),
}
