"""What configs of models with state-space blocks say; read and written by the same tables.

A table gives the field of each entry: one of ``DecoderSpec``, or after "mamba." and "moe." one of
its parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megablocks_core.layers.spec.entries import (
    KEPT,
    KEPT_OF_EXPERTS,
    Entries,
    rope,
    share_of,
    share_turned,
)
from megablocks_core.layers.spec.gated_delta import GATED_DELTA
from megablocks_core.layers.spec.hybrid_family import HybridFamily, Values
from megablocks_core.layers.spec.mamba_families import MAMBA_FAMILIES
from megablocks_core.layers.spec.mamba_hybrids import MAMBA_HYBRIDS
from megablocks_core.layers.spec.mixer_specs import DeltaSpec, Mamba1Spec, Mamba2Spec
from megablocks_core.layers.spec.moe_spec import MoESpec
from megablocks_core.layers.spec.state_spaces import MAMBA1, MAMBA2, write_state_spaces

if TYPE_CHECKING:
    from megablocks_core.layers.spec.decoder_spec import DecoderSpec

_MAY_BE_NULL = {"pad_token_id"}
# The share of a head's features that are turned.
_SHARE = "partial_rotary_factor"
# Entries that say how a model was trained at first, or how fast it runs.
_OF_TRAINING = (
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "num_logits_to_keep",
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_scale",
    "use_associative_scan",
    "use_mamba_kernels",
    "use_mambapy",
    "z_loss_coefficient",
)

HYBRIDS: dict[str, HybridFamily] = {**MAMBA_FAMILIES, **MAMBA_HYBRIDS, **GATED_DELTA}


def read_hybrid(name: str, entries: Entries) -> Values:
    """The fields of a spec, from the entries of a config of family ``name``.

    Raises:
        ValueError: An entry is missing, or asks for what a ``Decoder`` does not have.
    """
    family = HYBRIDS[name]
    for key, value in family.defaults.items():
        if key not in entries.null:
            entries.default(key, value)
    pattern = family.read_pattern(entries)
    family.derive(entries)
    used = family.used(pattern)
    values = {path: entries.need(key) for key, path in used.items() if key not in _MAY_BE_NULL}
    values |= {path: entries.take(key) for key, path in used.items() if key in _MAY_BE_NULL}
    for key in (*family.every_entry(), *_OF_TRAINING):
        entries.take(key)
    turns = _read_turns(entries, family, values.get("head_dim", 0))
    kept = (*KEPT, *KEPT_OF_EXPERTS, "pad_token_id")
    extra = {key: entries.take(key) for key in kept if key in entries}
    entries.finish(dict(family.required))
    return {
        **_no_sizes(pattern),
        **family.fixed,
        **{path: value for path, value in values.items() if "." not in path},
        "mamba": _part(family.mamba, "mamba.", values),
        "delta": _part(DeltaSpec, "delta.", values),
        "moe": _part(MoESpec, "moe.", values, **family.of_experts),
        **turns,
        "family": name,
        "pattern": pattern,
        "extra": extra,
    }


def write_hybrid(spec: DecoderSpec) -> Values:
    """The entries that ``read_hybrid`` reads.

    Raises:
        ValueError: A feature that configs of this family cannot name.
    """
    family, pattern = HYBRIDS[spec.family], spec.pattern or ""
    used = family.used(pattern)
    config: Values = {
        "architectures": [family.architecture],
        "model_type": spec.family,
        **family.write_pattern(pattern),
        **{key: _field(spec, path) for key, path in used.items()},
        **family.required,
        **_written_turns(spec, family),
        **spec.extra,
    }
    if family.expand:
        config[family.expand] = _expand(spec)
    if spec.family == "nemotron_h" and isinstance(spec.mamba, Mamba2Spec):
        config["time_step_min"] = spec.mamba.time_step_limit[0]
    again = type(spec)(**read_hybrid(spec.family, Entries({**config, "model_type": None})))
    for name in spec.__dataclass_fields__:
        value, only = getattr(spec, name), getattr(again, name)
        if value != only:
            raise ValueError(f"{name}={value!r} must be {only!r} in a config of {spec.family!r}")
    if spec.family in (MAMBA1, MAMBA2):
        config = write_state_spaces(config)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in config.items()}


def _no_sizes(pattern: str) -> Values:
    """Sizes of blocks that there may not be."""
    heads = ("num_heads", "num_kv_heads", "head_dim")
    return {"num_layers": len(pattern), "ffn_size": 0, **dict.fromkeys(heads, 0)}


def _part(kind: type[Any] | None, prefix: str, values: Values, **fixed: Any) -> Any:
    """A part of a spec; ``None`` if no entry is of it."""
    own = {path.removeprefix(prefix): v for path, v in values.items() if path.startswith(prefix)}
    return kind(**own, **fixed) if kind and own else None


def _field(spec: DecoderSpec, path: str) -> Any:
    """A field of a spec or of its parts."""
    part, _, name = path.rpartition(".")
    return getattr(getattr(spec, part) if part else spec, name)


def _expand(spec: DecoderSpec) -> int:
    """How much wider Mamba blocks are inside."""
    mamba = spec.mamba
    if isinstance(mamba, Mamba1Spec):
        inner = mamba.inner_size
    else:
        inner = 0 if mamba is None else mamba.num_heads * mamba.head_dim
    if inner % spec.hidden_size:
        raise ValueError(
            f"mamba={mamba} must be some times as wide as hidden_size={spec.hidden_size} in a "
            f"config of {spec.family!r}"
        )
    return inner // spec.hidden_size


def _read_turns(entries: Entries, family: HybridFamily, head_dim: int) -> Values:
    """How attention turns queries and keys, if it does."""
    asked = entries.take("position_embedding_type") == "rope" or not family.asks
    if not (family.turned and head_dim and asked):
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            entries.take(key)
        return {"rope": False}
    share = family.turned
    if family.any_share:
        share = share_turned(entries, family.turned)
    width = {} if share == 1 else {"rotary_dim": int(head_dim * share)}
    return rope(entries, whole=share) | width


def _written_turns(spec: DecoderSpec, family: HybridFamily) -> Values:
    if not spec.rope:
        return {}
    scaling = None if spec.rope_scaling is None else dict(spec.rope_scaling)
    asks: Values = {"position_embedding_type": "rope"} if family.asks else {}
    if family.any_share and spec.head_dim:
        asks[_SHARE] = share_of(spec.rotary_dim or spec.head_dim, spec.head_dim)
    return {"rope_theta": spec.rope_base, "rope_scaling": scaling, **asks}
