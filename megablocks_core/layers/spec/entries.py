"""The entries of a Hugging Face config; none is left out in silence."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from megablocks_core.layers.rotary import check_scaling

# Entries that say nothing about the model's function: some are written back, some are not.
KEPT = ("max_position_embeddings", "bos_token_id", "eos_token_id")
KEPT_OF_EXPERTS = ("output_router_logits", "router_aux_loss_coef")
INERT = {
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
    "quantization_config",  # how files hold weights, which whoever reads them knows or refuses
}


class Entries:
    """The entries of a config; each must be taken, be inert, or switch its feature off."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.left = {key: value for key, value in config.items() if value is not None}
        self.null = config.keys() - self.left.keys()

    def __contains__(self, key: str) -> bool:
        return key in self.left

    def peek(self, key: str) -> Any:
        """The entry, which stays; ``None`` if it is absent."""
        return self.left.get(key)

    def take(self, key: str, default: Any = None) -> Any:
        """The entry, which is dealt with then."""
        return self.left.pop(key, default)

    def default(self, key: str, value: Any) -> None:
        """What the entry means if it is absent."""
        self.left.setdefault(key, value)

    def need(self, key: str) -> Any:
        """As ``take``, of an entry that must be there."""
        if key not in self.left:
            raise ValueError(f"config must have {key!r}")
        return self.left.pop(key)

    def finish(self, required: Mapping[str, Any] | None = None) -> None:
        """Raise if an entry that is left asks for something, or a required one for another."""
        for key, value in {"pretraining_tp": 1, **(required or {})}.items():
            if (found := self.take(key, value)) != value:
                raise ValueError(f"{key}={found!r} must be {value!r}")
        on = {key: value for key, value in self.left.items() if value and key not in INERT}
        if on:
            raise ValueError(f"config asks for what a Decoder does not have: {on}")


def as_dict(config: Any) -> Mapping[str, Any]:
    """The entries of a dict, a transformers config, a ``config.json`` or its folder."""
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | os.PathLike):
        path = os.fspath(config)
        with open(os.path.join(path, "config.json") if os.path.isdir(path) else path) as file:
            return json.load(file, object_hook=_number)
    return config.to_dict()


def _number(entry: dict[str, Any]) -> Any:
    """Numbers that JSON does not have, as transformers writes them."""
    return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry


def rope(entries: Entries, *, whole: float = 1.0) -> dict[str, Any]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or the two older entries.

    Args:
        entries: Of the config.
        whole: The share of a head that is turned in this family.
    """
    scaling = dict(entries.take("rope_scaling", {})) | dict(entries.take("rope_parameters", {}))
    base = scaling.pop("rope_theta", entries.take("rope_theta", 10000.0))
    turned = scaling.pop("partial_rotary_factor", entries.take("partial_rotary_factor", whole))
    if turned != whole:
        raise ValueError(f"partial_rotary_factor={turned} must be {whole}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("llama3", "yarn") and "max_position_embeddings" in entries:
        scaling.setdefault(
            "original_max_position_embeddings", entries.peek("max_position_embeddings")
        )
    plain = check_scaling(scaling) == {"rope_type": "default"}
    return {"rope_base": base, "rope_scaling": None if plain else scaling}


def share_turned(entries: Entries, default: float) -> float:
    """The share of a head's features that positions turn, where a config may name it."""
    name = "partial_rotary_factor"
    stated = {**(entries.peek("rope_scaling") or {}), **(entries.peek("rope_parameters") or {})}
    return stated.get(name, entries.peek(name) or default)


def share_of(width: int, head_dim: int) -> float:
    """The share that gives ``width`` features where it is multiplied and rounded down."""
    share = width / head_dim
    return share if int(head_dim * share) == width else math.nextafter(share, 1.0)


def refuse_windows(entries: Entries, family: str, num_layers: int) -> None:
    """Sliding windows change the function: only configs in which no layer has one are read."""
    if family == "mistral" and "sliding_window" not in entries.null:
        window = entries.peek("sliding_window")
        raise ValueError(f"sliding_window={window} must be null (without it mistral has one)")
    if family.startswith("qwen"):
        _refuse_windows_of_qwen(entries, family, num_layers)
    other = set(entries.take("layer_types", ())) - {"full_attention"}
    if other:
        raise ValueError(f"layer_types must be full_attention throughout, not {sorted(other)}")


def _refuse_windows_of_qwen(entries: Entries, family: str, num_layers: int) -> None:
    """An entry switches windows on; which layers have one then depends on the family."""
    window, used = entries.take("sliding_window"), entries.take("use_sliding_window", False)
    if not used or (family != "qwen3_moe" and "layer_types" in entries):
        return
    bound = entries.peek("max_window_layers")
    bound = 28 if bound is None else bound
    if family == "qwen2_moe":
        slides = bound > 0
    else:
        every = family == "qwen3_moe" or bound < num_layers
        slides = every and "sliding_window" not in entries.null
    if slides:
        raise ValueError(f"use_sliding_window=True (of {window} tokens) must be False")
