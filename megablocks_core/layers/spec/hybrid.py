"""What a spec says of hybrid models, and how its pattern and its blocks agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megablocks_core.layers.spec.mixer_specs import DeltaSpec, Mamba1Spec, Mamba2Spec
from megablocks_core.layers.spec.moe_spec import MoESpec
from megablocks_core.layers.spec.pattern import (
    ATTENTION,
    DELTA,
    EXPERTS,
    FEED_FORWARD,
    MAMBA,
    blocks_of,
)
from megablocks_core.parallel.checks import check_whole

if TYPE_CHECKING:
    from megablocks_core.layers.spec.decoder_spec import DecoderSpec

# Fields that plain families of configs do not name, and what they are in these.
HYBRID_FIELDS: dict[str, Any] = {
    "pattern": None,
    "mamba": None,
    "delta": None,
    "gated_mlp": True,
    "gated_attention": False,
    "zero_centered_norms": False,
    "rope": True,
    "rotary_dim": None,
    "attention_scale": None,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logits_divisor": 1.0,
    "float32_residual": False,
}
# The fields of a spec that stand for a kind of block.
_SPECS = {MAMBA: "mamba", DELTA: "delta", EXPERTS: "moe"}
_KINDS_OF_SPECS = {"mamba": (Mamba1Spec, Mamba2Spec), "delta": (DeltaSpec,), "moe": (MoESpec,)}
_SIZES = {
    ATTENTION: ("num_heads", "num_kv_heads", "head_dim"),
    FEED_FORWARD: ("ffn_size",),
}


def check_blocks(spec: DecoderSpec) -> None:
    """Refuse sizes that make no model, and a pattern whose blocks the spec does not describe.

    Raises:
        ValueError: As said.
    """
    kinds = set(ATTENTION + FEED_FORWARD if spec.pattern is None else blocks_of(spec.pattern))
    wanted = [name for kind, names in _SIZES.items() if kind in kinds for name in names]
    for name in ("vocab_size", "hidden_size", "num_layers", *wanted):
        check_whole(name, getattr(spec, name), least=1)
    for name in (name for names in _SIZES.values() for name in names):
        if name not in wanted and getattr(spec, name):
            raise ValueError(
                f"{name}={getattr(spec, name)} must be 0 where pattern={spec.pattern!r} has no "
                "such block"
            )
    _check_pattern(spec, kinds)
    if spec.rotary_dim is not None and not 0 < spec.rotary_dim <= spec.head_dim:
        raise ValueError(
            f"rotary_dim={spec.rotary_dim} must be between 1 and head_dim={spec.head_dim}"
        )
    for name in ("attention_scale", "embedding_scale", "residual_scale", "logits_divisor"):
        if (scale := getattr(spec, name)) is not None and not scale > 0:
            raise ValueError(f"{name}={scale} must be above 0")


def _check_pattern(spec: DecoderSpec, kinds: set[str]) -> None:
    if spec.pattern is None:
        for name in ("mamba", "delta"):
            if getattr(spec, name) is not None:
                raise ValueError(f"pattern=None must have a block for {name}={getattr(spec, name)}")
        return
    for name, kinds_of_spec in _KINDS_OF_SPECS.items():
        if not isinstance(given := getattr(spec, name), (*kinds_of_spec, type(None))):
            names = " or ".join(kind.__name__ for kind in kinds_of_spec)
            raise ValueError(f"{name}={given!r} must be a {names}")
    count = len(blocks_of(spec.pattern))
    if spec.num_layers != count:
        raise ValueError(
            f"num_layers={spec.num_layers} must be {count}, the blocks of pattern={spec.pattern!r}"
        )
    for kind, name in _SPECS.items():
        if (kind in kinds) != (getattr(spec, name) is not None):
            raise ValueError(
                f"{name}={getattr(spec, name)!r} must be there if pattern={spec.pattern!r} has "
                f"{kind!r}, and only then"
            )
    if spec.moe is not None and (spec.moe.sparse_step != 1 or spec.moe.dense_layers):
        raise ValueError(
            f"moe={spec.moe} must have neither sparse_step nor dense_layers: "
            f"pattern={spec.pattern!r} says where experts are"
        )
