"""What a decoder is: sizes and features, read from and written to Hugging Face configs.

Reading needs no transformers. A feature of a config that a ``Decoder`` does not have raises
by name: it is never left out in silence.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megablocks_core.layers.mlp import ACTIVATIONS
from megablocks_core.layers.rotary import check_scaling
from megablocks_core.parallel.random.dropout import check_probability


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes and features of a decoder-only language model.

    Attributes:
        vocab_size: Number of tokens.
        hidden_size: Width of the residual stream.
        ffn_size: Width inside the feed-forward layers.
        num_layers: Number of blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Features of a head.
        activation: Name of the feed-forward activation.
        norm_eps: Added under the root in the norms.
        attention_bias: Biases of the attention projections; "qkv" for all but the last.
        mlp_bias: Biases of the feed-forward projections.
        qk_norm: Norms of query and key heads.
        rope_base: Base of the rotary frequencies.
        rope_scaling: A ``rope_scaling`` dict, or ``None``.
        tied: The head's weight is the embedding's.
        attention_dropout: Dropout of attention probabilities.
        hidden_dropout: Dropout of embeddings, and of what each attention and feed-forward layer
            adds to the residual stream.
        activation_dropout: Dropout inside the feed-forward layers.
        initializer_range: Standard deviation of the initial values.
        pad_token_id: A token whose embedding is zero at first and receives no gradient.
        family: ``model_type`` in a config.
        extra: Entries of a config that do not change the model, such as ``eos_token_id``.

    Raises:
        ValueError: A size is not positive, heads do not divide, a name is unknown, or a dropout
            is no probability.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str = "silu"
    norm_eps: float = 1e-6
    attention_bias: bool | Literal["qkv"] = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_base: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    tied: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    activation_dropout: float = 0.0
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    family: str = "llama"
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in _SIZES.values():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation={self.activation!r} must be one of {', '.join(ACTIVATIONS)}"
            )
        if self.pad_token_id is not None and not (
            -self.vocab_size <= self.pad_token_id < self.vocab_size
        ):
            raise ValueError(
                f"pad_token_id={self.pad_token_id} must be a token below {self.vocab_size}"
            )
        for name in ("attention_dropout", *_OWN_DROPOUTS):
            check_probability(getattr(self, name), name)
        object.__setattr__(self, "rope_scaling", check_scaling(self.rope_scaling))
        if self.family not in _FAMILIES:
            raise ValueError(f"family={self.family!r} must be one of {', '.join(_FAMILIES)}")

    @classmethod
    def from_hf(cls, config: Any) -> "DecoderSpec":
        """Read a config: a dict, a transformers config, a ``config.json`` or its folder.

        Raises:
            ValueError: An unknown ``model_type``, a size that is missing, or an entry that
                asks for what a ``Decoder`` does not have.
        """
        entries = _Entries(_as_dict(config))
        family = entries.take("model_type")
        if family not in _FAMILIES:
            raise ValueError(f"model_type={family!r} must be one of {', '.join(_FAMILIES)}")
        values: dict[str, Any] = {"family": family, **_FAMILIES[family]}
        heads, hidden = entries.peek("num_attention_heads"), entries.peek("hidden_size")
        if family == "llama" and heads and hidden:
            entries.default("num_key_value_heads", heads)
        if heads and hidden:
            entries.default("head_dim", 128 if family == "qwen3" else hidden // heads)
        for key, name in _SIZES.items():
            values[name] = entries.need(key)
        for key, name in _OPTIONS.items():
            if key in entries and name not in _FAMILIES[family]:
                values[name] = entries.take(key)
        values |= _rope(entries)
        _refuse_windows(entries, family)
        values["extra"] = {key: entries.take(key) for key in _KEPT if key in entries}
        entries.finish()
        return cls(**values)

    def to_hf(self) -> dict[str, Any]:
        """The config that ``from_hf`` reads, in the form every transformers version reads.

        Raises:
            ValueError: A feature that configs of this family cannot name.
        """
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            **{key: getattr(self, name) for key, name in (_SIZES | _OPTIONS).items()},
            "rope_theta": self.rope_base,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            **self.extra,
        }
        fixed = _FAMILIES[self.family]
        for name in ("qk_norm", "attention_bias", "mlp_bias"):
            value = getattr(self, name)
            if value != fixed.get(name, bool(value)):
                raise ValueError(f"{name}={value!r} has no place in a config of {self.family!r}")
        for name in _OWN_DROPOUTS:
            if rate := getattr(self, name):
                raise ValueError(f"{name}={rate} has no place in a config of {self.family!r}")
        for name in fixed:
            config.pop(name, None)
        if self.family == "mistral":
            config["sliding_window"] = None
        return config


# Our names for the entries of a config: sizes it must have, and options it may have.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
_OPTIONS = {
    "hidden_act": "activation",
    "rms_norm_eps": "norm_eps",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "tie_word_embeddings": "tied",
    "attention_dropout": "attention_dropout",
    "initializer_range": "initializer_range",
    "pad_token_id": "pad_token_id",
}
# Dropouts that configs of these families do not have.
_OWN_DROPOUTS = ("hidden_dropout", "activation_dropout")
# What a family fixes and its config has no say in.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False},
    "mistral": {"qk_norm": False, "attention_bias": False, "mlp_bias": False},
    "qwen2": {"qk_norm": False, "attention_bias": "qkv", "mlp_bias": False},
    "qwen3": {"qk_norm": True, "mlp_bias": False},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Entries that say nothing about the model's function: some are written back, some are not.
_KEPT = ("max_position_embeddings", "bos_token_id", "eos_token_id")
_INERT = {
    "architectures",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_name_or_path",
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "max_window_layers",
}


class _Entries:
    """The entries of a config; each must be taken, be inert, or switch its feature off."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.left = {key: value for key, value in config.items() if value is not None}
        self.null = config.keys() - self.left.keys()

    def __contains__(self, key: str) -> bool:
        return key in self.left

    def peek(self, key: str) -> Any:
        return self.left.get(key)

    def take(self, key: str, default: Any = None) -> Any:
        return self.left.pop(key, default)

    def default(self, key: str, value: Any) -> None:
        self.left.setdefault(key, value)

    def need(self, key: str) -> Any:
        if key not in self.left:
            raise ValueError(f"config must have {key!r}")
        return self.left.pop(key)

    def finish(self) -> None:
        if self.take("pretraining_tp", 1) != 1:
            raise ValueError("pretraining_tp must be 1")
        on = {key: value for key, value in self.left.items() if value and key not in _INERT}
        if on:
            raise ValueError(f"config asks for what a Decoder does not have: {on}")


def _as_dict(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | os.PathLike):
        path = os.fspath(config)
        with open(os.path.join(path, "config.json") if os.path.isdir(path) else path) as file:
            return json.load(file)
    return config.to_dict()


def _rope(entries: _Entries) -> dict[str, Any]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or the two older entries."""
    scaling = dict(entries.take("rope_scaling", {})) | dict(entries.take("rope_parameters", {}))
    base = scaling.pop("rope_theta", entries.take("rope_theta", 10000.0))
    turned = scaling.pop("partial_rotary_factor", entries.take("partial_rotary_factor", 1.0))
    if turned != 1:
        raise ValueError(f"partial_rotary_factor={turned} must be 1")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("llama3", "yarn") and "max_position_embeddings" in entries:
        scaling.setdefault(
            "original_max_position_embeddings", entries.peek("max_position_embeddings")
        )
    plain = check_scaling(scaling) == {"rope_type": "default"}
    return {"rope_base": base, "rope_scaling": None if plain else scaling}


def _refuse_windows(entries: _Entries, family: str) -> None:
    """Sliding windows change the function: only configs without them are read."""
    if family == "mistral" and "sliding_window" not in entries.null:
        window = entries.peek("sliding_window")
        raise ValueError(f"sliding_window={window} must be null (without it mistral has one)")
    if family.startswith("qwen"):
        window, used = entries.take("sliding_window"), entries.take("use_sliding_window", False)
        if used:
            raise ValueError(f"use_sliding_window=True (of {window} tokens) must be False")
    other = set(entries.take("layer_types", ())) - {"full_attention"}
    if other:
        raise ValueError(f"layer_types must be full_attention throughout, not {sorted(other)}")
