"""What a Hugging Face checkpoint of each family holds: names, shapes and ties, as data.

A weight has its on-disk name ("{}" stands for a layer's number, a second one for an expert's),
its shape in sizes of the config, the config entry without which it is absent, the layers that
have it, and our name where that is another. No
process group and no file is touched here: who holds which slice is said by marks alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Weight:
    """One kind of tensor.

    Attributes:
        name: On-disk name; "{}" for the number of a layer, and then for that of an expert.
        shape: Names of sizes, see ``_sizes``.
        when: Config entry that must be true; ``None`` for a weight that is always there.
        ours: Logical name in our models, if another.
        sparse: Whether it is of layers with experts or of others; ``None``: of all.
    """

    name: str
    shape: str
    when: str | None = None
    ours: str | None = None
    sparse: bool | None = None


@dataclass(frozen=True)
class Family:
    """All models of one ``model_type``.

    Attributes:
        architecture: Name of the transformers class.
        weights: Its tensors.
        defaults: What an absent config entry means in this family.
        ties: Name of a tensor that is left out when ``tie_word_embeddings``, and of the one
            that it equals.
        ignored: Names of tables that old checkpoints hold and nobody reads.
    """

    architecture: str
    weights: tuple[Weight, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ties: Mapping[str, str] = field(
        default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"}
    )
    ignored: tuple[str, ...] = ("model.layers.{}.self_attn.rotary_emb.inv_freq",)

    def schema(self, config: Mapping[str, Any]) -> Shapes:
        """On-disk name and whole shape of every tensor of a model with ``config``.

        Raises:
            ValueError: The config lacks a size.
        """
        known = {k: v for k, v in {**self.defaults, **config}.items() if v is not None}
        missing = [name for name in _NEEDED if name not in known]
        if missing:
            raise ValueError(f"config must have {missing}")
        sizes = _sizes(known)
        shapes: Shapes = {}
        for weight in self.weights:
            if weight.when is None or known.get(weight.when):
                shape = tuple(sizes[size] for size in weight.shape.split())
                shapes |= dict.fromkeys(_names(weight, known), shape)
        if known.get("tie_word_embeddings"):
            for name in self.ties:
                del shapes[name]
        return shapes

    def ours(self, name: str) -> str:
        """Our logical name of an on-disk tensor."""
        return self._renamed(name, [(w.name, w.ours) for w in self.weights if w.ours])

    def theirs(self, name: str) -> str:
        """The on-disk name of one of our logical tensors: the inverse of ``ours``."""
        return self._renamed(name, [(w.ours, w.name) for w in self.weights if w.ours])

    def ignores(self, name: str) -> bool:
        """Whether an on-disk tensor is one that nobody reads."""
        return any(_match(pattern, name) is not None for pattern in self.ignored)

    @staticmethod
    def _renamed(name: str, pairs: list[tuple[str, str]]) -> str:
        for old, new in pairs:
            layer = _match(old, name)
            if layer is not None:
                return new.format(*layer)
        return name


_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim", hidden // heads)
    return {
        "vocab": config["vocab_size"],
        "hidden": hidden,
        "ffn": config["intermediate_size"],
        "head": head,
        "q": heads * head,
        "kv": config.get("num_key_value_heads", heads) * head,
        "experts": _num_experts(config),
        "expert": config.get("moe_intermediate_size", config["intermediate_size"]),
        "shared": config.get("shared_expert_intermediate_size", 0),
        "one": 1,
    }


def _num_experts(config: Mapping[str, Any]) -> int:
    """Configs have one of two names; transformers 5 takes either for the other."""
    return config.get("num_local_experts", config.get("num_experts", 0))


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts, in a family that has some."""
    every = config.get("decoder_sparse_step", 1)
    return (layer + 1) % every == 0 and layer not in config.get("mlp_only_layers", ())


def _names(weight: Weight, config: Mapping[str, Any]) -> list[str]:
    """On-disk names of all tensors of one kind."""
    if "{}" not in weight.name:
        return [weight.name]
    layers = [
        layer
        for layer in range(config["num_hidden_layers"])
        if weight.sparse in (None, _is_sparse(config, layer))
    ]
    if weight.name.count("{}") == 1:
        return [weight.name.format(layer) for layer in layers]
    experts = range(_num_experts(config))
    return [weight.name.format(layer, expert) for layer in layers for expert in experts]


def _match(pattern: str, name: str) -> tuple[str, ...] | None:
    found = re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d+)"), name)
    return None if found is None else found.groups()


_FRAME = (
    Weight("model.embed_tokens.weight", "vocab hidden"),
    Weight("model.layers.{}.input_layernorm.weight", "hidden"),
    Weight("model.layers.{}.self_attn.q_proj.weight", "q hidden"),
    Weight("model.layers.{}.self_attn.k_proj.weight", "kv hidden"),
    Weight("model.layers.{}.self_attn.v_proj.weight", "kv hidden"),
    Weight("model.layers.{}.self_attn.o_proj.weight", "hidden q"),
    Weight("model.layers.{}.post_attention_layernorm.weight", "hidden"),
    Weight("model.norm.weight", "hidden"),
    Weight("lm_head.weight", "vocab hidden"),
)


def _mlp_shapes(width: str) -> dict[str, str]:
    return {"gate": f"{width} hidden", "up": f"{width} hidden", "down": f"hidden {width}"}


def _mlp(sparse: bool | None = None) -> tuple[Weight, ...]:
    return tuple(
        Weight(f"model.layers.{{}}.mlp.{name}_proj.weight", shape, sparse=sparse)
        for name, shape in _mlp_shapes("ffn").items()
    )


def _shared_expert() -> tuple[Weight, ...]:
    """An expert of all tokens, with a gate."""
    block = "model.layers.{}.mlp"
    parts = tuple(
        Weight(
            f"{block}.shared_expert.{name}_proj.weight",
            shape,
            ours=f"{block}.shared_experts.{name}_proj.weight",
            sparse=True,
        )
        for name, shape in _mlp_shapes("shared").items()
    )
    return (*parts, Weight(f"{block}.shared_expert_gate.weight", "one hidden", sparse=True))


def _experts(block: str, **names: str) -> tuple[Weight, ...]:
    """A router and experts whose parts have these on-disk names."""
    ours = "model.layers.{}.mlp"
    theirs = f"model.layers.{{}}.{block}"
    shapes = _mlp_shapes("expert")
    pairs = [("gate.weight", "gate.weight", "experts hidden")]
    pairs += [
        (f"experts.{{}}.{name}.weight", f"experts.{{}}.{part}_proj.weight", shapes[part])
        for part, name in names.items()
    ]
    return tuple(
        Weight(
            f"{theirs}.{name}",
            shape,
            ours=f"{ours}.{own}" if (theirs, name) != (ours, own) else None,
            sparse=True,
        )
        for name, own, shape in pairs
    )


_TRUNK = (*_FRAME, *_mlp())
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_QK_NORMS = (
    Weight("model.layers.{}.self_attn.q_norm.weight", "head"),
    Weight("model.layers.{}.self_attn.k_norm.weight", "head"),
)


def _attention_biases(when: str | None, *names: str) -> tuple[Weight, ...]:
    sizes = {"q": "q", "k": "kv", "v": "kv", "o": "hidden"}
    return tuple(
        Weight(f"model.layers.{{}}.self_attn.{name}_proj.bias", sizes[name], when) for name in names
    )


_MLP_BIASES = tuple(
    Weight(f"model.layers.{{}}.mlp.{name}_proj.bias", size, "mlp_bias")
    for name, size in (("gate", "ffn"), ("up", "ffn"), ("down", "hidden"))
)

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", (*_TRUNK, *_attention_biases("attention_bias", *"qkvo"), *_MLP_BIASES)
    ),
    "mistral": Family("MistralForCausalLM", _TRUNK, {"num_key_value_heads": 8}),
    "qwen2": Family(
        "Qwen2ForCausalLM", (*_TRUNK, *_attention_biases(None, *"qkv")), {"num_key_value_heads": 32}
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        (*_TRUNK, *_QK_NORMS, *_attention_biases("attention_bias", *"qkvo")),
        {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        (*_FRAME, *_experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
        {"num_key_value_heads": 8, "num_experts": 8},
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        (
            *_FRAME,
            *_attention_biases(None, *"qkv"),
            *_mlp(sparse=False),
            *_experts("mlp", **_PROJECTIONS),
            *_shared_expert(),
        ),
        {
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (
            *_FRAME,
            *_QK_NORMS,
            *_attention_biases("attention_bias", *"qkvo"),
            *_mlp(sparse=False),
            *_experts("mlp", **_PROJECTIONS),
        ),
        {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        (
            *_FRAME,
            Weight("model.layers.{}.self_attn.q_norm.weight", "q"),
            Weight("model.layers.{}.self_attn.k_norm.weight", "kv"),
            *_attention_biases("attention_bias", *"qkvo"),
            *_experts("mlp", **_PROJECTIONS),
        ),
        {"num_experts": 64},
    ),
}
