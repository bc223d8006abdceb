"""Which dtype each tensor of a folder has, and whether values fit it, before one is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from megablocks_core.export.finite import ends, greatest_finite, is_finite
from megablocks_core.export.layout import Layout
from megablocks_core.export.source import FLOATS, HfFolder
from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.groups import Group, Held, Whole, together
from megablocks_core.groups.placements import local

# Of all tensors, or by on-disk name; a tensor that is not named, or is not floating-point, has its
# own.
Dtypes = torch.dtype | Mapping[str, torch.dtype] | None

_FLOATING = {code: dtype for dtype, code in DTYPE_CODES.items() if code in FLOATS}
_SERVED = tuple(_FLOATING.values())


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
    if dtype is not None and dtype not in _SERVED:
        served = ", ".join(map(str, _SERVED))
        raise ValueError(f"dtype={dtype!r} must be one of {served}, or 'like'")
    return dtype


def dtype_of(name: str, own: torch.dtype, dtypes: Dtypes) -> torch.dtype:
    """The dtype on disk of a tensor whose values are ``own`` in the model."""
    if dtypes is None or not own.is_floating_point:
        return own
    return dtypes.get(name, own) if isinstance(dtypes, Mapping) else dtypes


def check_floating(wholes: Iterable[Whole]) -> None:
    """Raise for tensors of the model that no folder of plain ones has.

    Raises:
        ValueError: Some are not floating-point, or have eight bits, by name.
    """
    strange = [f"{one.name} is {one.dtype}" for one in wholes if one.dtype not in _SERVED]
    if strange:
        served = ", ".join(map(str, _SERVED))
        raise ValueError(f"model must have tensors of {served}, but {', '.join(strange)}")


class _Seen(NamedTuple):
    """What one rank's shares show, by logical name; texts name the dtype too.

    Attributes:
        strange: Shares with values that are not finite.
        large: Shares with values that become infinite.
        lost: Shares whose values all become zero, and some were not.
        kept: Shares that keep some.
    """

    strange: set[str]
    large: dict[str, str]
    lost: dict[str, str]
    kept: set[str]


def check_values(
    held: Iterable[Held],
    layout: Layout,
    dtypes: Dtypes,
    *,
    group: Group,
    allow_nonfinite: bool = False,
) -> None:
    """Look at the values of all ranks, and compare them with what the dtypes on disk can say.

    Every rank calls it; each looks at its own shares, once. Sends three small messages, or two if
    no tensor vanishes.

    Raises:
        ValueError: On every rank, with names: values are not finite, unless that is allowed; finite
            ones become infinite; or those of a whole tensor that has some become zero.
    """
    with together("looking at the values", group=group):
        own = _seen(held, layout, dtypes)
    everyone = group.all_gather_object(own[:3])
    strange = list(dict.fromkeys(name for one, _, _ in everyone for name in sorted(one)))
    if strange and not allow_nonfinite:
        raise ValueError(
            f"the model's values must be finite, but are not in {', '.join(strange)}; "
            "allow_nonfinite=True writes them"
        )
    large = {name: text for _, one, _ in everyone for name, text in one.items()}
    if large:
        raise ValueError(f"dtype must hold the values: some become infinite in {_names(large)}")
    lost = {name: text for *_, one in everyone for name, text in one.items()}
    if not lost:
        return
    for alive in group.all_gather_object(own.kept & lost.keys()):
        for name in alive:
            lost.pop(name, None)
    if lost:
        raise ValueError(f"dtype must hold the values: all become zero in {_names(lost)}")


def _seen(held: Iterable[Held], layout: Layout, dtypes: Dtypes) -> _Seen:
    owners = {name: rule for rule in layout.all_rules for name in rule.ours}
    seen = _Seen(set(), {}, {}, set())
    for name, tensor, _ in held:
        own, theirs = tensor.dtype, owners[name].theirs if name in owners else ()
        targets = {dtype_of(one, own, dtypes) for one in theirs}
        values, greatest = local(tensor.detach()), 0.0
        narrow = [dtype for dtype in targets if _is_narrower(dtype, own)]
        if not is_finite(values):
            seen.strange.add(name)
            greatest = greatest_finite(values) if narrow else 0.0
        elif narrow:
            greatest = float(ends(values).abs().max())
        for dtype in narrow if greatest else ():
            became = float(torch.tensor(greatest, dtype=torch.float64).to(dtype))
            if became == inf:
                seen.large[name] = f"{name} as {dtype}"
            elif not became:
                seen.lost[name] = f"{name} as {dtype}"
            else:
                seen.kept.add(name)
    return seen


def _is_narrower(dtype: torch.dtype, own: torch.dtype) -> bool:
    """Whether values may leave its range, which ends earlier towards zero if it does above."""
    if not (dtype.is_floating_point and own.is_floating_point):
        return False
    new, old = torch.finfo(dtype), torch.finfo(own)
    return new.smallest_normal * new.eps > old.smallest_normal * old.eps


def _names(found: Mapping[str, str]) -> str:
    return ", ".join(found.values())
