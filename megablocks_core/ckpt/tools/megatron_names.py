"""What Megatron's GPT weights are called in Hugging Face's models, and which rows of which.

Megatron stacks layers along a first axis and experts along a second, joins q, k and v by
key/value group, gate and up one after the other, and keeps a norm's weight with the linear layer
behind it. It may also write layers, experts, gate and up each as a tensor of its own
(``non_homogeneous_layers``, ``singleton_local_shards``).

Dimensions: L layers, E experts, Q query heads, G key/value heads, D a head's size, H hidden,
F feed-forward, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# Optimizer, random state, arguments, and what fp8 layers keep: no weights.
NO_WEIGHTS = re.compile(
    r"(optimizer\.|chained_\d+\.|rng_state|common_state|rerun_state_machine_state).*"
    r"|.*\._extra_state(/.*)?"
)
_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *_EXPERTS)
_PLAIN = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(linear_fc[12])\.(weight(?:_[wv])?)")
_FC1 = re.compile(r"mlp\.linear_fc1\.(weight|bias)(_[wv])?")


class Rows(NamedTuple):
    """Rows of a tensor, at fixed places of the axes before: ``tensor[index][start:stop]``."""

    key: str
    index: tuple[int, ...]
    start: int
    stop: int


class Source(NamedTuple):
    """A tensor made of rows, one after the other."""

    shape: tuple[int, ...]
    rows: list[Rows]


@dataclass(frozen=True)
class Sizes:
    """What a Hugging Face config says of a model."""

    family: str
    layers: int
    heads: int
    groups: int
    head: int
    vocab: int
    experts: int
    is_tied: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> Sizes:
        """The sizes in a config.

        Raises:
            ValueError: It is of another family, or lacks a size.
        """
        family = config.get("model_type")
        if family not in _FAMILIES:
            raise ValueError(f"config has the model_type {family!r}, which must be of {_FAMILIES}")
        needed = ["num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_size"]
        missing = [name for name in needed if not isinstance(config.get(name), int)]
        if missing:
            raise ValueError(f"config must have {missing}")
        heads = config["num_attention_heads"]
        experts = config.get("num_local_experts") or config.get("num_experts") or 0
        return Sizes(
            family,
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            experts if family in _EXPERTS else 0,
            bool(config.get("tie_word_embeddings")),
        )


def map_names(shapes: Mapping[str, tuple[int, ...]], sizes: Sizes) -> dict[str, Source]:
    """Where each tensor of the Hugging Face model lies in Megatron's.

    Args:
        shapes: Of Megatron's weights, by key.
        sizes: Of the model.

    Raises:
        ValueError: A key has no place in the model, a shape does not fit it, or a tensor of it is
            missing.
    """
    found: dict[str, Source] = {}
    unknown = []
    for key, shape in shapes.items():
        sources = dict(_sources(key, shape, sizes))
        if not sources:
            unknown.append(key)
        for name in sources.keys() & found.keys():
            raise ValueError(f"{key!r} is {name!r}, as is {found[name].rows[0].key!r}")
        found |= sources
    if unknown:
        raise ValueError(
            f"{len(unknown)} keys have no place in a model of the family {sizes.family!r}: "
            f"{', '.join(unknown[:5])}"
        )
    expected = set(_expected(sizes))
    missing = sorted(expected - found.keys())
    if missing:
        raise ValueError(f"{len(missing)} tensors of the model are missing: {missing[:5]}")
    more = [name for name in found if name not in expected and not name.endswith(".bias")]
    if more:
        raise ValueError(f"config says that there are no such tensors: {more[:5]}")
    return found


def _sources(key: str, shape: tuple[int, ...], sizes: Sizes) -> Iterator[tuple[str, Source]]:
    if key in _TOP:
        rows = shape[0] if key == "decoder.final_layernorm.weight" else sizes.vocab
        if not shape or shape[0] < rows:
            raise ValueError(f"{key!r} of shape {shape} must have {rows} rows or more (padding)")
        yield _TOP[key], Source((rows, *shape[1:]), [Rows(key, (), 0, rows)])
        return
    match = _LAYER.fullmatch(key)
    if match is None:
        return
    number, inner = match.groups()
    if number is None and (not shape or shape[0] != sizes.layers):
        raise ValueError(f"{key!r} of shape {shape} must have {sizes.layers} layers")
    for layer in range(sizes.layers) if number is None else [int(number)]:
        index = (layer,) if number is None else ()
        part = _Part(key, index, shape[len(index) :], sizes)
        for name, source in part.sources(inner):
            yield f"model.layers.{layer}.{name}", source


class _Part(NamedTuple):
    """One layer of a stacked tensor, or a tensor of one layer."""

    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    sizes: Sizes

    def sources(self, inner: str) -> Iterator[tuple[str, Source]]:
        family = self.sizes.family
        if inner in _PLAIN:
            yield _PLAIN[inner], self.rows((0, self._count()))
        elif inner in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            yield from self._attention(inner.rpartition(".")[2])
        elif (match := _FC1.fullmatch(inner)) is not None:
            names = f"mlp.gate_proj.{match[1]}", f"mlp.up_proj.{match[1]}"
            yield from self._gate_and_up(*names, match[2])
        elif family in _EXPERTS and inner == "mlp.router.weight":
            yield f"{_EXPERTS[family][0]}.gate.weight", self.rows((0, self._count()))
        elif family in _EXPERTS and (match := _EXPERT.fullmatch(inner)) is not None:
            yield from self._experts(*match.groups())

    def rows(self, *spans: tuple[int, int]) -> Source:
        count = sum(stop - start for start, stop in spans)
        found = [Rows(self.key, self.index, start, stop) for start, stop in spans]
        return Source((count, *self.shape[1:]), found)

    def _count(self) -> int:
        if not self.shape:
            raise ValueError(f"{self.key!r} has too few dimensions")
        return self.shape[0]

    def _gate_and_up(self, gate: str, up: str, part: str | None) -> Iterator[tuple[str, Source]]:
        """Gate and up, one after the other, or the one that ``part`` names."""
        if part is not None:
            yield (gate if part == "_w" else up), self.rows((0, self._count()))
            return
        if self._count() % 2:
            raise ValueError(f"{self.key!r} of {self.shape} must hold gate and up, of equal size")
        half = self._count() // 2
        yield gate, self.rows((0, half))
        yield up, self.rows((half, 2 * half))

    def _attention(self, kind: str) -> Iterator[tuple[str, Source]]:
        """q, k and v of a tensor of [G (Q/G + 2) D] rows: each group's queries, key and value."""
        heads, groups, size = self.sizes.heads, self.sizes.groups, self.sizes.head
        if heads % groups or self._count() != (heads + 2 * groups) * size:
            raise ValueError(
                f"{self.key!r} of {self.shape} must have ({heads} + 2 * {groups}) * {size} rows"
            )
        each = heads // groups
        for name, first, count in ("q", 0, each), ("k", each, 1), ("v", each + 1, 1):
            starts = [(group * (each + 2) + first) * size for group in range(groups)]
            spans = [(start, start + count * size) for start in starts]
            yield f"self_attn.{name}_proj.{kind}", self.rows(*spans)

    def _experts(self, number: str | None, inner: str, kind: str) -> Iterator[tuple[str, Source]]:
        """Tensors of [E 2F H] or [E H F], or of the one expert ``number``."""
        if number is None and self._count() != self.sizes.experts:
            raise ValueError(f"{self.key!r} of {self.shape} must have {self.sizes.experts} experts")
        block, (gate, up, down) = _EXPERTS[self.sizes.family]
        for expert in range(self.sizes.experts) if number is None else [int(number)]:
            one = self
            if number is None:
                one = _Part(self.key, (*self.index, expert), self.shape[1:], self.sizes)
            name = f"{block}.experts.{expert}"
            if inner == "linear_fc1":
                names = f"{name}.{gate}.weight", f"{name}.{up}.weight"
                part = kind.removeprefix("weight")
                yield from one._gate_and_up(*names, part or None)
            elif kind == "weight":
                yield f"{name}.{down}.weight", one.rows((0, one._count()))


def _expected(sizes: Sizes) -> Iterator[str]:
    """Names that a model has, but for biases that a config may ask for."""
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    if not sizes.is_tied:
        yield "lm_head.weight"
    inner = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    inner += [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    if sizes.family == "qwen2":
        inner += [f"self_attn.{name}_proj.bias" for name in "qkv"]
    if sizes.family.startswith("qwen3"):
        inner += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    if sizes.family in _EXPERTS:
        block, names = _EXPERTS[sizes.family]
        inner.append(f"{block}.gate.weight")
        inner += [
            f"{block}.experts.{expert}.{name}.weight"
            for expert in range(sizes.experts)
            for name in names
        ]
    else:
        inner += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    for layer in range(sizes.layers):
        yield from (f"model.layers.{layer}.{name}" for name in inner)
