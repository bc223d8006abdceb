"""How configs of hybrid models tell which block stands where, and patterns from and to that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megablocks_core.layers.spec.entries import Entries
from megablocks_core.layers.spec.pattern import (
    ATTENTION,
    BLOCKS,
    EXPERTS,
    FEED_FORWARD,
    MAMBA,
    blocks_of,
)

# Names of blocks in configs, the newer first; "mamba" and "attention" are older ones.
_KINDS = {
    "linear_attention": MAMBA,
    "full_attention": ATTENTION,
    "mlp": FEED_FORWARD,
    "moe": EXPERTS,
    "mamba": MAMBA,
    "attention": ATTENTION,
}
_NAMES = {letter: name for name, letter in reversed(_KINDS.items())}


def read_count(entries: Entries) -> str:
    """A pattern of Mamba blocks alone."""
    return MAMBA * entries.need("num_hidden_layers")


def write_count(pattern: str) -> dict[str, Any]:
    """The inverse of ``read_count``."""
    return {"num_hidden_layers": len(_only(pattern, MAMBA))}


def read_singles(entries: Entries) -> str:
    """A pattern from a list with one name a block, or a string with one letter a block."""
    text, names = entries.take("hybrid_override_pattern"), _list(entries)
    pattern = text if names is None else "".join(names)
    if pattern is None:
        raise ValueError("config must have 'layers_block_type' or 'hybrid_override_pattern'")
    count = entries.take("num_hidden_layers", len(pattern))
    if count != len(blocks_of(pattern)):
        raise ValueError(f"num_hidden_layers={count} must be {len(pattern)}, as {pattern!r} has")
    return pattern


def write_singles(pattern: str) -> dict[str, Any]:
    """The inverse of ``read_singles``; in the string, which every version of transformers reads."""
    blocks = _only(pattern, "".join(_NAMES))
    return {"hybrid_override_pattern": blocks, "num_hidden_layers": len(blocks)}


def read_pairs(entries: Entries) -> str:
    """A pattern of pairs: a mixer, and a feed-forward layer or experts, in every layer."""
    count, names = entries.need("num_hidden_layers"), _list(entries)
    places = entries.take("attn_layer_indices")
    if names is None:
        names = [ATTENTION if n in (places or ()) else MAMBA for n in range(count)]
    if len(names) != count or set(names) - {MAMBA, ATTENTION}:
        raise ValueError(f"layer_types must name {count} Mamba or attention layers")
    second = EXPERTS if entries.peek("num_local_experts") else FEED_FORWARD
    return "".join(name + second for name in names)


def write_places(pattern: str) -> dict[str, Any]:
    """The inverse of ``read_pairs``, with the numbers of the layers that attend."""
    mixers = _mixers(pattern)
    places = [number for number, letter in enumerate(mixers) if letter == ATTENTION]
    return {"num_hidden_layers": len(mixers), "attn_layer_indices": places}


def write_layer_types(pattern: str) -> dict[str, Any]:
    """The inverse of ``read_pairs``, with a list of names."""
    mixers = _mixers(pattern)
    old = {MAMBA: "mamba", ATTENTION: "attention"}
    names = {"layer_types": [old[letter] for letter in mixers]}
    experts = {} if EXPERTS in pattern else {"num_local_experts": 0}
    return {"num_hidden_layers": len(mixers), **names, **experts}


def _list(entries: Entries) -> Sequence[str] | None:
    """Letters from a list of names; an entry of either name."""
    names = entries.take("layers_block_type", entries.take("layer_types"))
    if names is None:
        return None
    if unknown := sorted(set(names) - set(_KINDS)):
        raise ValueError(f"layers_block_type has {unknown} and may have {', '.join(_KINDS)}")
    return [_KINDS[name] for name in names]


def _mixers(pattern: str) -> str:
    """The first letters of a pattern's pairs."""
    blocks = blocks_of(pattern)
    mixers, seconds = blocks[::2], blocks[1::2]
    alike = set(seconds) in ({FEED_FORWARD}, {EXPERTS})
    if len(mixers) != len(seconds) or not alike or set(mixers) - {MAMBA, ATTENTION}:
        raise ValueError(
            f"pattern={pattern!r} must be of pairs here: Mamba or attention, then in every pair a "
            "feed-forward layer, or in every pair experts"
        )
    return mixers


def _only(pattern: str, letters: str) -> str:
    """The pattern's blocks, if they are of these kinds alone."""
    blocks = blocks_of(pattern)
    if set(blocks) - set(letters):
        kinds = ", ".join(BLOCKS[letter] for letter in letters)
        raise ValueError(f"pattern={pattern!r} must have no block here but {kinds}")
    return blocks
