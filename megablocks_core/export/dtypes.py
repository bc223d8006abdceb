"""Which dtype each tensor of a folder has, and whether values fit theirs, before one is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megablocks_core.export.layout import Layout
from megablocks_core.export.source import FLOATS, HfFolder
from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.groups import Group, Held
from megablocks_core.groups.placements import local

# Of all tensors, or by on-disk name; a tensor that is not named, or is not floating-point, has its
# own.
Dtypes = torch.dtype | Mapping[str, torch.dtype] | None

_FLOATING = {code: dtype for dtype, code in DTYPE_CODES.items() if code in FLOATS}


def chosen(
    dtype: torch.dtype | Literal["like"] | None, like: str | os.PathLike[str] | None
) -> Dtypes:
    """What ``dtype=`` and ``like=`` ask for; with "like" each tensor has its dtype in that folder.

    Raises:
        ValueError: ``dtype`` is none that a folder of plain tensors has, or ``like`` is missing.
    """
    if dtype == "like":
        if like is None:
            raise ValueError("dtype='like' needs a folder like=, whose tensors have the dtypes")
        found = HfFolder(Path(like)).tensors
        codes = {name: tensor.get_dtype() for name, tensor in found.items()}
        return {name: _FLOATING[code] for name, code in codes.items() if code in _FLOATING}
    if dtype is not None and dtype not in _FLOATING.values():
        served = ", ".join(str(one) for one in _FLOATING.values())
        raise ValueError(f"dtype={dtype!r} must be one of {served}, or 'like'")
    return dtype


def dtype_of(name: str, own: torch.dtype, dtypes: Dtypes) -> torch.dtype:
    """The dtype on disk of a tensor whose values are ``own`` in the model."""
    if dtypes is None or not own.is_floating_point:
        return own
    return dtypes.get(name, own) if isinstance(dtypes, Mapping) else dtypes


def check_range(held: Iterable[Held], layout: Layout, dtypes: Dtypes, *, group: Group) -> None:
    """Compare the values of all ranks with what the dtypes on disk can say.

    Every rank calls it; each looks at its own shares, once. Sends two small messages, or one if no
    tensor vanishes. Values that are not finite are not looked at.

    Raises:
        ValueError: On every rank, with names: values become infinite, or those of a whole tensor
            that has some become zero.
    """
    large, lost, kept = _seen(held, layout, dtypes)
    everyone = group.all_gather_object((large, lost))
    all_large = {name: text for one, _ in everyone for name, text in one.items()}
    if all_large:
        raise ValueError(f"dtype must hold the values: some become infinite in {_names(all_large)}")
    all_lost = {name: text for _, one in everyone for name, text in one.items()}
    if not all_lost:
        return
    for alive in group.all_gather_object(kept & all_lost.keys()):
        for name in alive:
            all_lost.pop(name, None)
    if all_lost:
        raise ValueError(f"dtype must hold the values: all become zero in {_names(all_lost)}")


def _seen(
    held: Iterable[Held], layout: Layout, dtypes: Dtypes
) -> tuple[dict[str, str], dict[str, str], set[str]]:
    """Shares with values that become infinite, shares that become zero, and others, by name."""
    owners = {name: rule for rule in layout.all_rules for name in rule.ours}
    large: dict[str, str] = {}
    lost: dict[str, str] = {}
    kept: set[str] = set()
    for name, tensor, _ in held:
        own, theirs = tensor.dtype, owners[name].theirs if name in owners else ()
        targets = {dtype_of(one, own, dtypes) for one in theirs}
        narrow = [dtype for dtype in targets if _is_narrower(dtype, own)]
        greatest = _greatest(local(tensor.detach())) if narrow else 0.0
        for dtype in narrow if greatest else ():
            became = float(torch.tensor(greatest, dtype=torch.float64).to(dtype))
            if became == float("inf"):
                large[name] = f"{name} as {dtype}"
            elif not became:
                lost[name] = f"{name} as {dtype}"
            else:
                kept.add(name)
    return large, lost, kept


def _is_narrower(dtype: torch.dtype, own: torch.dtype) -> bool:
    """Whether values may leave its range, which ends earlier towards zero if it does above."""
    if not (dtype.is_floating_point and own.is_floating_point):
        return False
    new, old = torch.finfo(dtype), torch.finfo(own)
    return new.smallest_normal * new.eps > old.smallest_normal * old.eps


def _greatest(values: Tensor) -> float:
    """The greatest magnitude of finite values."""
    if not values.numel():
        return 0.0
    low, high = (float(end) for end in torch.aminmax(values))
    if abs(low) + abs(high) < float("inf"):
        return max(abs(low), abs(high))
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _names(found: Mapping[str, str]) -> str:
    return ", ".join(found.values())
