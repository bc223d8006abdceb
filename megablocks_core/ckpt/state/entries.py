"""What ``state`` holds, as this rank's shares of logical tensors and JSON values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.ckpt.arguments import check_state, short
from megablocks_core.ckpt.format.file_names import FILE_NAME, LONGEST_NAME, NUMBERED
from megablocks_core.ckpt.json_values import check_json
from megablocks_core.ckpt.state.logical import LogicalOptimizer
from megablocks_core.ckpt.state.optimizers import find_owners, merge_optimizer, optimizer_entry
from megablocks_core.ckpt.state.shares import Name, Share, joined, tensor_shares
from megablocks_core.groups import Group, logical_tensors


@dataclass
class Entries:
    """``state`` taken apart.

    Attributes:
        shares: This rank's part of all tensors; a tied tensor once, under its first name.
        state: What the manifest says of each entry.
    """

    shares: list[Share] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


def take_apart(state: Mapping[str, Any], *, group: Group) -> Entries:
    """List all that this rank holds of ``state``.

    Raises:
        ValueError: ``state`` is no mapping, or has a name that is no file name, a value of
            another kind, a tensor on meta or of which ranks outside ``group`` hold a part, an
            optimizer of a parameter that no module of ``state`` holds, or an optimizer tensor
            whose cut cannot be known.
    """
    check_state(state)
    entries = Entries()
    owners = find_owners(state)
    for name, value in state.items():
        kind = kind_of(name, value)
        entry: dict[str, Any] = {"kind": kind}
        entries.state[name] = entry
        if kind == "module":
            for logical, tensor, specs in logical_tensors(value, remove_duplicate=True):
                entries.shares += tensor_shares(Name(name, logical), tensor, specs, group=group)
        elif kind == "tensor":
            entries.shares += tensor_shares(Name(name, name), value, (), group=group)
        elif kind == "optimizer":
            shares, entry["value"] = optimizer_entry(name, value, owners, group)
            entries.shares += joined(shares)
        else:
            entry["value"] = value
    return entries


def kind_of(name: str, value: Any) -> str:
    """Kind of one entry of ``state``.

    Raises:
        ValueError: The name is no file name, or the value is of no kind that is served.
    """
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"state name {short(name)} must be letters, digits, '_', '.' and '-'")
    if len(name) > LONGEST_NAME:
        raise ValueError(
            f"state name {short(name)} of {len(name)} letters must have at most {LONGEST_NAME}"
        )
    if NUMBERED.fullmatch(name):
        raise ValueError(f"state name {name!r} must not end as the files of a rank are numbered")
    for kind, types in _KINDS.items():
        if isinstance(value, types):
            return kind
    check_json(value, f"state[{name!r}]")
    return "json"


_KINDS = {
    "module": (nn.Module,),
    "optimizer": (LogicalOptimizer, torch.optim.Optimizer),
    "tensor": (Tensor,),
}


def merge_states(states: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What the manifest says of each entry, from what every rank says.

    Raises:
        ValueError: Ranks differ in the names, or in a value that should be equal.
    """
    first = states[0]
    for rank, state in enumerate(states):
        if list(state) != list(first):
            raise ValueError(
                f"state must have the same names on all ranks: rank 0 has {list(first)}, "
                f"rank {rank} has {list(state)}"
            )
    merged = {}
    for name in first:
        entries = [state[name] for state in states]
        torchs = (one["kind"] == "optimizer" and "param_groups" in one["value"] for one in entries)
        if all(torchs):
            value = merge_optimizer(name, [entry["value"] for entry in entries])
            merged[name] = {"kind": "optimizer", "value": value}
            continue
        texts = [json.dumps(entry, sort_keys=True) for entry in entries]
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise ValueError(
                    f"state[{name!r}] must be equal on all ranks: rank 0 has {texts[0][:200]}, "
                    f"rank {rank} has {text[:200]}"
                )
        merged[name] = first[name]
    return merged
