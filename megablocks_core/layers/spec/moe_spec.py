"""What the mixtures of experts of a decoder are, and what configs call it."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from megablocks_core.layers.spec.entries import Entries

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True)
class MoESpec:
    """Sizes and features of a decoder's mixtures of experts.

    Attributes:
        num_experts: Experts of a layer.
        top_k: How many of them a token chooses.
        ffn_size: Width inside an expert.
        score: From logits to scores: "softmax", "sigmoid" or "sqrtsoftplus".
        renormalize: A token's weights are divided by their sum.
        sparse_step: Every so many layers has experts: layer n if it divides n + 1.
        dense_layers: Layers that have none all the same, counted from 0.
        shared_ffn_size: Width of a feed-forward layer that all tokens share; 0 for none.
        shared_gate: What is shared is weighted by a sigmoid of each token.
        scale: Of a token's weights.
        selection_bias: Scores have a bias for the choice alone; see ``TopKRouter``.
        num_groups: Equal groups of experts; 1: choices are not limited to some of them.
        top_k_groups: How many groups a token chooses from, those whose two best scores add up to
            most.

    Raises:
        ValueError: A size is not positive, ``top_k`` is more than the experts, ``score`` is no
            such name, groups do not fit, or a dense layer is counted from the end.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    score: Score = "softmax"
    renormalize: bool = True
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    shared_ffn_size: int = 0
    shared_gate: bool = False
    scale: float = 1.0
    selection_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "ffn_size", "sparse_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} must not be above num_experts={self.num_experts}")
        if self.shared_ffn_size < 0 or (self.shared_gate and not self.shared_ffn_size):
            raise ValueError(
                f"shared_ffn_size={self.shared_ffn_size} must be at least {int(self.shared_gate)}"
            )
        if self.score not in get_args(Score):
            raise ValueError(f"score={self.score!r} must be one of {', '.join(get_args(Score))}")
        if not self.scale > 0:
            raise ValueError(f"scale={self.scale} must be above 0")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups} must divide num_experts={self.num_experts}"
            )
        if not 1 <= self.top_k_groups <= self.num_groups:
            raise ValueError(
                f"top_k_groups={self.top_k_groups} must be between 1 and "
                f"num_groups={self.num_groups}"
            )
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        if any(layer < 0 for layer in self.dense_layers):
            raise ValueError(f"dense_layers={self.dense_layers} must be counted from 0")

    def is_sparse(self, layer: int) -> bool:
        """Whether ``layer``, counted from 0, has experts."""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


_QWEN = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "ffn_size",
    "norm_topk_prob": "renormalize",
    "decoder_sparse_step": "sparse_step",
    "mlp_only_layers": "dense_layers",
}
_DEEPSEEK = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "ffn_size",
    "norm_topk_prob": "renormalize",
    "routed_scaling_factor": "scale",
    "n_group": "num_groups",
    "topk_group": "top_k_groups",
}
# Families whose configs count the first layers, which are dense, and shared experts.
_COUNTING = ("glm4_moe",)
# What a family's config calls the fields, what an absent entry means, and what has no entry.
ENTRIES: dict[str, dict[str, str]] = {
    "mixtral": {"num_local_experts": "num_experts", "num_experts_per_tok": "top_k"},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": "shared_ffn_size"},
    "qwen3_moe": _QWEN,
    "olmoe": {
        "num_experts": "num_experts",
        "num_experts_per_tok": "top_k",
        "norm_topk_prob": "renormalize",
    },
    "glm4_moe": _DEEPSEEK,
}
_QWEN_DEFAULTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        **_QWEN_DEFAULTS,
    },
    "qwen3_moe": _QWEN_DEFAULTS,
    "olmoe": {"norm_topk_prob": False},
    "glm4_moe": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}
_FIXED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_gate": True},
    "glm4_moe": {"score": "sigmoid", "selection_bias": True},
}


def read_moe(entries: Entries, family: str, ffn_size: int) -> MoESpec | None:
    """The experts of a config; ``None`` for a family without."""
    if family not in ENTRIES:
        return None
    for own, other in (("num_local_experts", "num_experts"), ("num_experts", "num_local_experts")):
        if own in ENTRIES[family] and own not in entries and other in entries:
            entries.default(own, entries.take(other))
    for key, value in _DEFAULTS[family].items():
        entries.default(key, value)
    values = {name: entries.need(key) for key, name in ENTRIES[family].items()}
    if family in _COUNTING:
        values["dense_layers"] = tuple(range(entries.need("first_k_dense_replace")))
        values["shared_ffn_size"] = entries.need("n_shared_experts") * values["ffn_size"]
    return MoESpec(**{"ffn_size": ffn_size, **values, **_FIXED.get(family, {})})


def write_moe(moe: MoESpec | None, family: str, ffn_size: int) -> dict[str, Any]:
    """The entries of a config that ``read_moe`` reads.

    Raises:
        ValueError: A feature that configs of this family cannot name.
    """
    names = ENTRIES.get(family, {})
    if moe is None or not names:
        return {}
    config = {key: getattr(moe, name) for key, name in names.items()}
    counted = _counts(moe, family) if family in _COUNTING else {}
    plain = MoESpec(moe.num_experts, moe.top_k, ffn_size)
    fixed = {name: getattr(plain, name) for name in MoESpec.__dataclass_fields__}
    for name, only in {**fixed, **_FIXED.get(family, {})}.items():
        value = getattr(moe, name)
        if name not in (*names.values(), *(_COUNTED if counted else ())) and value != only:
            raise ValueError(f"moe.{name}={value!r} must be {only!r} in a config of {family!r}")
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in {**config, **counted}.items()
    }


_COUNTED = ("dense_layers", "shared_ffn_size")


def _counts(moe: MoESpec, family: str) -> dict[str, int]:
    """How many first layers are dense, and how many experts are shared."""
    dense, (shared, rest) = len(moe.dense_layers), divmod(moe.shared_ffn_size, moe.ffn_size)
    if moe.dense_layers != tuple(range(dense)):
        raise ValueError(
            f"moe.dense_layers={moe.dense_layers} must be the first ones in a config of {family!r}"
        )
    if rest:
        raise ValueError(
            f"moe.shared_ffn_size={moe.shared_ffn_size} must be some times "
            f"moe.ffn_size={moe.ffn_size} in a config of {family!r}"
        )
    return {"first_k_dense_replace": dense, "n_shared_experts": shared}
