"""What a Hugging Face checkpoint of each family holds: names, shapes and ties, as data.

A weight has its on-disk name ("{}" stands for a layer's number), its shape in sizes of the
config, the config entry without which it is absent, and our name where that is another. No
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
        name: On-disk name; "{}" for the number of a layer.
        shape: Names of sizes, see ``_sizes``.
        when: Config entry that must be true; ``None`` for a weight that is always there.
        ours: Logical name in our models, if another.
    """

    name: str
    shape: str
    when: str | None = None
    ours: str | None = None


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
                count = known["num_hidden_layers"] if "{}" in weight.name else 1
                for layer in range(count):
                    shape = tuple(sizes[size] for size in weight.shape.split())
                    shapes[weight.name.format(layer)] = shape
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
    }


def _match(pattern: str, name: str) -> tuple[str, ...] | None:
    found = re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d+)"), name)
    return None if found is None else found.groups()


_TRUNK = (
    Weight("model.embed_tokens.weight", "vocab hidden"),
    Weight("model.layers.{}.input_layernorm.weight", "hidden"),
    Weight("model.layers.{}.self_attn.q_proj.weight", "q hidden"),
    Weight("model.layers.{}.self_attn.k_proj.weight", "kv hidden"),
    Weight("model.layers.{}.self_attn.v_proj.weight", "kv hidden"),
    Weight("model.layers.{}.self_attn.o_proj.weight", "hidden q"),
    Weight("model.layers.{}.post_attention_layernorm.weight", "hidden"),
    Weight("model.layers.{}.mlp.gate_proj.weight", "ffn hidden"),
    Weight("model.layers.{}.mlp.up_proj.weight", "ffn hidden"),
    Weight("model.layers.{}.mlp.down_proj.weight", "hidden ffn"),
    Weight("model.norm.weight", "hidden"),
    Weight("lm_head.weight", "vocab hidden"),
)
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
}
