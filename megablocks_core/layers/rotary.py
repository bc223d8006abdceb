"""Rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864, section 3.2).

Feature ``i`` of the first half of a head and feature ``i`` of the second half are turned
together by ``position * frequency[i]``, the pairing of Hugging Face's weights. Scaled
frequencies follow the ``rope_scaling`` dicts of Hugging Face configs: ``linear``
(https://arxiv.org/abs/2306.15595), ``llama3`` (https://arxiv.org/abs/2407.21783) and
``yarn`` (https://arxiv.org/abs/2309.00071).

Dimensions: T tokens, N heads, D features of a head, R of them turned (the first ones), r = R / 2.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Which keys each kind of scaling must have, and may have.
_KINDS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}


class RotaryEmbedding(nn.Module):
    """Cosines and sines for the positions of tokens.

    Maps ``positions`` [... T] to ``cos`` and ``sin`` [... T r], computed in float64 and kept
    in float32, or in float64 for a float64 model. ``rotate`` applies them; one pair serves
    every layer. It has no parameters or buffers and sends nothing.

    Args:
        head_dim: Features of a head.
        rotary_dim: How many of them are turned; default all. Frequencies are
            ``base^(-2i / rotary_dim)``: they depend on this width, not on the head's.
        base: Base of the frequencies (``rope_theta``).
        scaling: ``None`` or a ``rope_scaling`` dict.

    Raises:
        ValueError: ``rotary_dim`` is odd or wider than the head, or ``scaling`` is of an
            unknown kind, lacks a key or has one that its kind does not use.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_dim: int | None = None,
        base: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if not 0 < self.rotary_dim <= head_dim or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim={self.rotary_dim} must be even and between 2 and head_dim={head_dim}"
            )
        self.base = float(base)
        self.scaling = check_scaling(scaling)

    def forward(
        self, positions_T: Tensor, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Tables for ``positions``; ``dtype`` is that of the model."""
        device = positions_T.device
        frequencies_r = frequencies(
            self.rotary_dim, base=self.base, scaling=self.scaling, device=device
        )
        angles_Tr = positions_T.unsqueeze(-1) * frequencies_r
        wide = torch.promote_types(dtype, torch.float32)
        factor = attention_factor(self.scaling)
        return (angles_Tr.cos() * factor).to(wide), (angles_Tr.sin() * factor).to(wide)

    def extra_repr(self) -> str:
        """What sets the frequencies."""
        return f"rotary_dim={self.rotary_dim}, base={self.base}, scaling={self.scaling}"


def rotate(x_TND: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> Tensor:
    """Turn the first ``2 r`` features of every head; the others stay as they are.

    Computed in the tables' dtype. Backward keeps the tables only.
    """
    cos_T1r, sin_T1r = cos_Tr.unsqueeze(-2), sin_Tr.unsqueeze(-2)
    r = cos_T1r.shape[-1]
    first, second, rest = x_TND.split([r, r, x_TND.shape[-1] - 2 * r], dim=-1)
    turned = (first * cos_T1r - second * sin_T1r, second * cos_T1r + first * sin_T1r)
    return torch.cat([*(half.to(x_TND.dtype) for half in turned), rest], dim=-1)


def frequencies(
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Radians by which each pair of features turns from one position to the next, float64 [r]."""
    exponents_r = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    plain_r = base**-exponents_r
    if scaling is None or scaling["rope_type"] == "default":
        return plain_r
    slow_r = plain_r / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow_r
    if scaling["rope_type"] == "llama3":
        keep_r = _llama3_share(plain_r, scaling)
    else:
        keep_r = _yarn_share(rotary_dim, base, scaling, plain_r)
    return plain_r * keep_r + slow_r * (1 - keep_r)


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """What cosines and sines are multiplied by: above 1 for yarn, else 1."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = scaling["factor"]
    mscale, over = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and over:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, over)
    return _yarn_mscale(factor, 1.0)


def check_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A checked copy of a ``rope_scaling`` dict, its kind under ``rope_type``.

    Raises:
        ValueError: Unknown kind, a key is missing, or a key is not one of that kind.
    """
    if scaling is None:
        return None
    given = {key: value for key, value in scaling.items() if value is not None}
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)  # Older configs carry both names.
    if kind not in _KINDS:
        raise ValueError(f"rope_type={kind!r} must be one of {', '.join(_KINDS)}")
    needed, optional = _KINDS[kind]
    if missing := needed - given.keys():
        raise ValueError(f"scaling={dict(scaling)} must have {sorted(missing)} for {kind!r}")
    if unknown := given.keys() - needed - optional:
        raise ValueError(f"scaling={dict(scaling)} must not have {sorted(unknown)} for {kind!r}")
    return {"rope_type": kind, **given}


def _llama3_share(plain_r: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """How much of each frequency stays: all of the fast ones, none of the slow ones."""
    turns_r = plain_r * (scaling["original_max_position_embeddings"] / (2 * math.pi))
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    return ((turns_r - low) / (high - low)).clamp(0, 1)


def _yarn_share(
    rotary_dim: int, base: float, scaling: Mapping[str, Any], plain_r: Tensor
) -> Tensor:
    """How much of each frequency stays: a ramp over the index of the pair."""
    low, high = (
        rotary_dim
        * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi))
        / (2 * math.log(base))
        for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    index_r = torch.arange(len(plain_r), dtype=plain_r.dtype, device=plain_r.device)
    return 1 - ((index_r - low) / (high - low or 0.001)).clamp(0, 1)


def _yarn_mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
