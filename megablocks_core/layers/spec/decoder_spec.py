"""What a decoder is: sizes and features, read from and written to Hugging Face configs.

Reading needs no transformers. A feature of a config that a ``Decoder`` does not have raises
by name: it is never left out in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megablocks_core.layers.mlp import ACTIVATIONS
from megablocks_core.layers.rotary import check_scaling
from megablocks_core.layers.spec.entries import (
    KEPT,
    KEPT_OF_EXPERTS,
    Entries,
    as_dict,
    refuse_windows,
    rope,
    share_of,
    share_turned,
)
from megablocks_core.layers.spec.families import (
    ARCHITECTURES,
    DEFAULTS,
    FAMILIES,
    MISSING,
    OPTIONS,
    OWN_DROPOUTS,
    OWN_OPTIONS,
    PREDICTORS,
    SIZES,
    TURNED,
    WITHOUT_LAST_BIAS,
)
from megablocks_core.layers.spec.hybrid import HYBRID_FIELDS, check_blocks
from megablocks_core.layers.spec.hybrid_families import HYBRIDS, read_hybrid, write_hybrid
from megablocks_core.layers.spec.mixer_specs import DeltaSpec, Mamba1Spec, Mamba2Spec
from megablocks_core.layers.spec.moe_spec import ENTRIES, MoESpec, read_moe, write_moe
from megablocks_core.layers.spec.state_spaces import is_state_spaces, read_state_spaces
from megablocks_core.parallel.random.dropout import check_probability


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes and features of a decoder-only language model.

    Attributes:
        vocab_size: Number of tokens.
        hidden_size: Width of the residual stream.
        ffn_size: Width inside the feed-forward layers; as the sizes of heads, 0 in a pattern
            that has none.
        num_layers: Number of blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Features of a head.
        activation: Name of the feed-forward activation.
        norm_eps: Added under the root in the norms.
        attention_bias: Biases of the attention projections; "qkv" for all but the last.
        mlp_bias: Biases of the feed-forward projections.
        qk_norm: Norms of query and key heads; "projection" for norms over all of them at once.
        clip_qkv: Queries, keys and values are clamped to this size.
        rope_base: Base of the rotary frequencies.
        rope_scaling: A ``rope_scaling`` dict, or ``None``.
        tied: The head's weight is the embedding's.
        attention_dropout: Dropout of attention probabilities.
        hidden_dropout: Dropout of embeddings, and of what each attention and feed-forward layer
            adds to the residual stream.
        activation_dropout: Dropout inside the feed-forward layers.
        initializer_range: Standard deviation of the initial values.
        pad_token_id: A token whose embedding is zero at first and receives no gradient.
        moe: Its mixtures of experts, which stand in place of feed-forward layers; ``None``: none.
        pattern: One letter a block, see ``layers.spec.pattern``; ``None``: every block is
            attention and a feed-forward layer or experts, each behind a norm.
        mamba: Its Mamba blocks, if the pattern has some.
        delta: Its gated delta nets, if the pattern has some.
        gated_mlp: Feed-forward layers are ``GatedMLP``, not ``MLP``.
        gated_attention: What attention gives is multiplied by gates, see ``Attention``.
        zero_centered_norms: Norms of blocks and of heads multiply by one plus their weights.
        rope: Attention turns queries and keys by their positions.
        rotary_dim: How many features of a head are turned; ``None``: all.
        attention_scale: Of the products of queries and keys; default 1 / sqrt(head_dim).
        embedding_scale: Of the embeddings.
        residual_scale: Of what each block adds.
        logits_divisor: Logits are divided by it.
        float32_residual: The residual stream is float32 where parameters are narrower.
        family: ``model_type`` in a config.
        extra: Entries of a config that do not change the model, such as ``eos_token_id``.

    Raises:
        ValueError: A size is not positive, heads do not divide, a name is unknown, a dropout
            is no probability, or the pattern and the specs of its blocks do not agree.
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
    qk_norm: bool | Literal["projection"] = False
    clip_qkv: float | None = None
    rope_base: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    tied: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    activation_dropout: float = 0.0
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    moe: MoESpec | None = None
    pattern: str | None = None
    mamba: Mamba1Spec | Mamba2Spec | None = None
    delta: DeltaSpec | None = None
    gated_mlp: bool = True
    gated_attention: bool = False
    zero_centered_norms: bool = False
    rope: bool = True
    rotary_dim: int | None = None
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    float32_residual: bool = False
    family: str = "llama"
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_blocks(self)
        if self.num_heads and self.num_heads % self.num_kv_heads:
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
        for name in ("attention_dropout", *OWN_DROPOUTS):
            check_probability(getattr(self, name), name)
        if not (isinstance(self.norm_eps, int | float) and self.norm_eps >= 0):
            raise ValueError(f"norm_eps={self.norm_eps!r} must be a number of at least 0")
        object.__setattr__(self, "rope_scaling", check_scaling(self.rope_scaling))
        if self.family not in FAMILIES | HYBRIDS:
            known = ", ".join(FAMILIES | HYBRIDS)
            raise ValueError(f"family={self.family!r} must be one of {known}")
        self._check_experts()

    def _check_experts(self) -> None:
        if self.clip_qkv is not None and self.clip_qkv <= 0:
            raise ValueError(f"clip_qkv={self.clip_qkv} must be above 0")
        if self.moe is None and self.family in ENTRIES:
            raise ValueError(f"moe=None must be a MoESpec in family {self.family!r}")
        if self.moe is not None and self.activation_dropout:
            raise ValueError("activation_dropout must be 0 where there are experts: none drops")

    @classmethod
    def from_hf(cls, config: Any) -> "DecoderSpec":
        """Read a config: a dict, a transformers config, a ``config.json`` or its folder.

        Raises:
            ValueError: An unknown ``model_type``, a size that is missing or cannot be, or a family
                or an entry that asks for what a ``Decoder`` does not have.
        """
        try:
            return cls._from_entries(as_dict(config))
        except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            raise ValueError(
                f"config has an entry of a wrong type or size: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def _from_entries(cls, given: Mapping[str, Any]) -> "DecoderSpec":
        entries = Entries(read_state_spaces(given) if is_state_spaces(given) else given)
        family = entries.take("model_type")
        if family in HYBRIDS:
            return cls(**read_hybrid(family, entries))
        if family in MISSING:
            raise ValueError(
                f"model_type={family!r}: a Decoder has no {MISSING[family]} yet; load_hf fills a "
                "transformers model"
            )
        if family not in FAMILIES:
            known = ", ".join(FAMILIES | HYBRIDS)
            raise ValueError(f"model_type={family!r} must be one of {known}")
        return cls(**_read_plain(family, entries))

    def to_hf(self) -> dict[str, Any]:
        """The config that ``from_hf`` reads, in the form every transformers version reads.

        Raises:
            ValueError: A feature that configs of this family cannot name.
        """
        return write_hybrid(self) if self.family in HYBRIDS else self._plain_config()

    def _plain_config(self) -> dict[str, Any]:
        """The config of a model whose every block is attention and a feed-forward layer."""
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            **{key: getattr(self, name) for key, name in (SIZES | OPTIONS).items()},
            "rope_theta": self.rope_base,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            **write_moe(self.moe, self.family, self.ffn_size),
            **self.extra,
        }
        self._refuse_unnamed()
        own = OWN_OPTIONS.get(self.family, {})
        config |= {key: getattr(self, name) for key, name in own.items()}
        for name in FAMILIES[self.family]:
            config.pop(name, None)
        if self.family in TURNED:
            share = share_of(self.rotary_dim or self.head_dim, self.head_dim)
            config["partial_rotary_factor"] = share
        if self.family in WITHOUT_LAST_BIAS:
            del config["attention_bias"]
            config[WITHOUT_LAST_BIAS[self.family]] = bool(self.attention_bias)
        if self.family in PREDICTORS:
            config[PREDICTORS[self.family]] = 0
        if self.family == "mistral":
            config["sliding_window"] = None
        return config

    def _refuse_unnamed(self) -> None:
        """Raise where a field is what configs of this family cannot name."""
        family = self.family
        if self.moe is not None and family not in ENTRIES:
            raise ValueError(f"moe={self.moe} has no place in a config of {family!r}")
        bias = "qkv" if family in WITHOUT_LAST_BIAS else True
        only = {
            **HYBRID_FIELDS,
            **dict.fromkeys(OWN_DROPOUTS, 0.0),
            "clip_qkv": None,
            "qk_norm": bool(self.qk_norm),
            "attention_bias": bias if self.attention_bias else False,
            "mlp_bias": bool(self.mlp_bias),
            **FAMILIES[family],
        }
        named = {"clip_qkv"} & set(OWN_OPTIONS.get(family, {}).values())
        for name in named | ({"rotary_dim"} if family in TURNED else set()):
            del only[name]
        for name, value in only.items():
            if (found := getattr(self, name)) != value:
                raise ValueError(f"{name}={found!r} has no place in a config of {family!r}")


def _read_plain(family: str, entries: Entries) -> dict[str, Any]:
    """The fields of a model whose every block is attention and a feed-forward layer."""
    values: dict[str, Any] = {"family": family, **FAMILIES[family]}
    fixed = FAMILIES[family].keys() | ({"attention_bias"} if family in WITHOUT_LAST_BIAS else set())
    _fill_in(family, entries)
    for key, name in SIZES.items():
        values[name] = entries.need(key)
    for key, name in OPTIONS.items():
        if key in entries and name not in fixed:
            values[name] = entries.take(key)
    for key, name in OWN_OPTIONS.get(family, {}).items():
        values[name] = entries.take(key)
    if family in WITHOUT_LAST_BIAS:
        values["attention_bias"] = "qkv" if entries.take(WITHOUT_LAST_BIAS[family]) else False
    values |= _turns(entries, family, values["head_dim"])
    entries.take(PREDICTORS.get(family, ""))
    refuse_windows(entries, family, values["num_layers"])
    values["moe"] = read_moe(entries, family, values["ffn_size"])
    kept = (*KEPT, *KEPT_OF_EXPERTS) if family in ENTRIES else KEPT
    values["extra"] = {key: entries.take(key) for key in kept if key in entries}
    entries.finish()
    return values


def _fill_in(family: str, entries: Entries) -> None:
    """What entries mean that are absent."""
    heads, hidden = entries.peek("num_attention_heads"), entries.peek("hidden_size")
    for key, value in DEFAULTS.get(family, {}).items():
        if key not in entries.null:
            entries.default(key, value)
    if heads and (family in ("llama", "olmoe") or "num_key_value_heads" in entries.null):
        entries.default("num_key_value_heads", heads)
    if heads and hidden:
        entries.default("head_dim", 128 if family == "qwen3" else hidden // heads)


def _turns(entries: Entries, family: str, head_dim: int) -> dict[str, Any]:
    """How queries and keys are turned, and how many features of a head."""
    if family not in TURNED:
        return rope(entries)
    share = share_turned(entries, TURNED[family])
    width = {} if share == 1 else {"rotary_dim": int(head_dim * share)}
    return rope(entries, whole=share) | width
