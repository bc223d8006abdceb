"""The tensors of each rank's file, made of those of a Hugging Face folder by slicing.

Every linear weight is [out in]. A rank has whole heads: its queries, then its keys, then its
values; where there are fewer heads of keys than ranks, neighbours hold the same one. ``mlp.fc``
is what the activation goes over and ``mlp.gate`` what it is multiplied with; of experts these are
one tensor, ``gate`` first, that is up before gate in Hugging Face's words.

Dimensions: V tokens, H hidden features, F inner features, E experts of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megablocks_core.export.lazies import Lazy, shape_of
from megablocks_core.export.operations import Offset
from megablocks_core.export.quantising.tensors import converted
from megablocks_core.export.trtllm.mamba import mamba_layer
from megablocks_core.export.trtllm.mapping import Place
from megablocks_core.export.trtllm.model import GEMMAS, Model
from megablocks_core.export.trtllm.scales import Piece, Scales
from megablocks_core.export.trtllm.slices import (
    cut,
    joined,
    part,
    transposed,
    with_means,
    with_zeros,
)

Weights = Mapping[str, Lazy]
_HEAD = "lm_head.weight"
_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_layernorm",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
    "self_attn.q_norm": "attention.q_layernorm",
    "self_attn.k_norm": "attention.k_layernorm",
    "ln_1": "input_layernorm",
    "ln_2": "post_layernorm",
}
# Router, and gate, up and down of an expert.
_EXPERTS = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}


def padded_vocab(model: Model, tp: int) -> int:
    """How many rows all slices of the head have: a multiple of ``tp``."""
    return -(-model.vocab // tp) * tp


def tensors(
    model: Model, weights: Weights, place: Place, dtype: torch.dtype, scales: Scales
) -> list[Piece]:
    """All that the file of one rank holds.

    Args:
        model: Its sizes.
        weights: Those of a Hugging Face folder by on-disk name; a tied head is not among them.
        place: The rank.
        dtype: Of all that is not float32 by its nature, and not quantised.
        scales: What is quantised.
    """
    return _Rank(model, weights, place, dtype, scales).pieces()


class _Rank:
    def __init__(
        self, model: Model, weights: Weights, place: Place, dtype: torch.dtype, scales: Scales
    ) -> None:
        self.model, self.weights, self.place = model, weights, place
        self.dtype, self.scales = dtype, scales
        self.tp, self.index = place.mapping.tp, place.tp_rank

    def pieces(self) -> list[Piece]:
        frame = {"gpt2": _GPT2_FRAME, "mamba2": _MAMBA_FRAME}.get(self.model.family, _FRAME)
        found: list[Piece] = []
        if self.place.is_first:
            found += self._embeddings(frame)
        for local, layer in enumerate(self.place.layers(self.model.layers)):
            ours = f"{frame['layers']}.{local}"
            if self.model.family == "mamba2":
                source = f"backbone.layers.{layer}"
                found += self._norm(f"{source}.norm", f"{ours}.input_layernorm")
                found += mamba_layer(
                    self.model, self.weights, source, ours, (self.index, self.tp), self.dtype
                )
            elif self.model.family == "gpt2":
                found += self._gpt2_layer(f"transformer.h.{layer}", ours)
            else:
                found += self._layer(f"model.layers.{layer}", ours)
        if self.place.is_last:
            found += self._norm(frame["norm"], frame["ln_f"])
            found.append(self._head(frame["embedding"]))
        return found

    def _plain(self, name: str, value: Lazy) -> Piece:
        return Piece(name, value, self.dtype)

    def _embeddings(self, frame: Mapping[str, str]) -> list[Piece]:
        """Tables, cut by rows but for Mamba's; rows that are added are never looked up."""
        found = []
        for source, ours in (("embedding", "vocab"), ("positions", "position")):
            if source in frame:
                table = self.weights[frame[source]]
                if self.model.family != "mamba2":
                    rows = -(-shape_of(table)[0] // self.tp) * self.tp
                    table = cut(with_zeros(table, rows), self.index, self.tp)
                found.append(self._plain(f"{frame['root']}.{ours}_embedding.weight", table))
        return found

    def _head(self, embedding: str) -> Piece:
        """The head, cut by rows; rows that are added are a mean of the first ones.

        Their logit is the mean of those of the first tokens, and no mean is above the largest.
        Rows of zeros would win where all other logits are below 0.
        """
        whole = self.weights.get(_HEAD, self.weights[embedding])
        rows = padded_vocab(self.model, self.tp)
        return self._plain(_HEAD, cut(with_means(whole, rows), self.index, self.tp))

    def _norm(self, source: str, ours: str) -> list[Piece]:
        found = []
        for kind in ("weight", "bias"):
            value = self.weights.get(f"{source}.{kind}")
            if value is not None and self.model.family in GEMMAS:
                # Stored around zero; the sum is rounded to the dtype once.
                (value,) = Offset(1.0)([converted(value, torch.float32)])
            if value is not None:
                found.append(self._plain(f"{ours}.{kind}", value))
        return found

    def _layer(self, source: str, ours: str) -> list[Piece]:
        found: list[Piece] = []
        for theirs, name in _NORMS.items():
            found += self._norm(f"{source}.{theirs}", f"{ours}.{name}")
        attention = f"{source}.self_attn"
        names = [f"{attention}.{kind}_proj" for kind in "qkv"]
        found += self._attention(ours, [f"{name}.weight" for name in names])
        if f"{names[0]}.bias" in self.weights:
            biases = [self.weights[f"{name}.bias"] for name in names]
            found.append(self._plain(f"{ours}.attention.qkv.bias", self._qkv(biases)))
        found += self._rows(f"{ours}.attention.dense", f"{attention}.o_proj")
        if self.model.experts:
            return found + self._experts(source, ours)
        # Runtimes may join the two, which then have one factor.
        both = [f"{source}.mlp.{kind}_proj.weight" for kind in ("gate", "up")]
        for kind, name in (("gate", "fc"), ("up", "gate")):
            theirs = f"{source}.mlp.{kind}_proj"
            weight = self.weights[f"{theirs}.weight"]
            found += self._linear(f"{ours}.mlp.{name}", theirs, weight, 0, both)
        return found + self._rows(f"{ours}.mlp.proj", f"{source}.mlp.down_proj")

    def _attention(self, ours: str, names: list[str]) -> list[Piece]:
        whole = [self.weights[name] for name in names]
        name = f"{ours}.attention"
        found = self.scales.linear(f"{name}.qkv", names, self._qkv(whole), self.dtype)
        return found + self.scales.cache(name, names[1], names[2])

    def _qkv(self, parts: list[Lazy]) -> Lazy:
        """This rank's heads of queries, keys and values, one behind the other."""
        query, *cached = parts
        heads, size = self.model.kv_heads, self.model.head
        if heads < self.tp:
            head = self.index // (self.tp // heads)
            own = [part(one, head * size, size) for one in cached]
        else:
            own = [cut(one, self.index, self.tp) for one in cached]
        return joined([cut(query, self.index, self.tp), *own])

    def _rows(self, ours: str, source: str) -> list[Piece]:
        """A linear layer cut by inputs; a runtime adds the bias once, so that every rank has it."""
        return self._linear(ours, source, self.weights[f"{source}.weight"], dim=1)

    def _linear(
        self, ours: str, source: str, weight: Lazy, dim: int, alike: Sequence[str] = ()
    ) -> list[Piece]:
        """A linear layer cut by outputs or inputs; ``alike`` are weights with the same factor."""
        own = cut(weight, self.index, self.tp, dim)
        found = self.scales.linear(ours, alike or [f"{source}.weight"], own, self.dtype)
        bias = self.weights.get(f"{source}.bias")
        if bias is not None:
            own = cut(bias, self.index, self.tp) if dim == 0 else bias
            found.append(self._plain(f"{ours}.bias", own))
        return found

    def _experts(self, source: str, ours: str) -> list[Piece]:
        router, experts, kinds = _EXPERTS[self.model.family]
        count, mapping = self.model.experts, self.place.mapping
        at, of = self.place.moe_tp_rank, mapping.moe_tp or 1
        gate, up, down = (
            [f"{source}.{experts}.{expert}.{kind}.weight" for expert in range(count)]
            for kind in kinds
        )
        own = self.place.experts(count)
        fc = {
            expert: joined([cut(self.weights[one[expert]], at, of) for one in (up, gate)])
            for expert in own
        }
        proj = {expert: cut(self.weights[down[expert]], at, of, 1) for expert in own}
        both = list(zip(up, gate, strict=True))
        return [
            Piece(
                f"{ours}.mlp.router.weight",
                self.weights[f"{source}.{router}.weight"],
                torch.float32,
            ),
            *self.scales.experts(f"{ours}.mlp.fc", both, fc, self.dtype),
            *self.scales.experts(f"{ours}.mlp.proj", [(one,) for one in down], proj, self.dtype),
        ]

    def _gpt2_layer(self, source: str, ours: str) -> list[Piece]:
        """On disk its matrices are [in out], and queries, keys and values are columns of one."""
        found: list[Piece] = []
        for name in ("ln_1", "ln_2"):
            found += self._norm(f"{source}.{name}", f"{ours}.{_NORMS[name]}")
        name, hidden = f"{source}.attn.c_attn", self.model.hidden
        for kind in ("weight", "bias"):
            whole = self.weights[f"{name}.{kind}"]
            whole = transposed(whole) if kind == "weight" else whole
            own = self._qkv([part(whole, index * hidden, hidden) for index in range(3)])
            if kind == "weight":
                qkv = f"{ours}.attention.qkv"
                found += self.scales.linear(qkv, [f"{name}.weight"], own, self.dtype)
            else:
                found.append(self._plain(f"{ours}.attention.qkv.bias", own))
        for theirs, name, dim in (
            ("attn.c_proj", "attention.dense", 1),
            ("mlp.c_fc", "mlp.fc", 0),
            ("mlp.c_proj", "mlp.proj", 1),
        ):
            weight = transposed(self.weights[f"{source}.{theirs}.weight"])
            found += self._linear(f"{ours}.{name}", f"{source}.{theirs}", weight, dim)
        return found


_FRAME = {
    "root": "transformer",
    "layers": "transformer.layers",
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm",
    "ln_f": "transformer.ln_f",
}
_GPT2_FRAME = {
    **_FRAME,
    "embedding": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "norm": "transformer.ln_f",
}
_MAMBA_FRAME = {
    "root": "backbone",
    "layers": "backbone.layers",
    "embedding": "backbone.embeddings.weight",
    "norm": "backbone.norm_f",
    "ln_f": "backbone.ln_f",
}
