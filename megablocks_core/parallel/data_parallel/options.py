"""Which options of a reduction of gradients are right."""

from __future__ import annotations

import torch

from megablocks_core.groups import Group, check_group


def check_arguments(
    group: Group,
    expert_group: Group,
    replicate: Group,
    reduction: str,
    reduce_dtype: torch.dtype | None,
    wire_dtype: torch.dtype | None,
) -> None:
    """Raise ``ValueError`` unless these arguments of a ``Reducer`` are right."""
    check_group(group)
    check_group(expert_group, "expert_group")
    check_group(replicate, "replicate")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction={reduction!r} must be "mean" or "sum"')
    for name, dtype in (("reduce_dtype", reduce_dtype), ("wire_dtype", wire_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{name}={dtype!r} must be a floating dtype of torch")
    if wire_dtype is not None and wire_dtype.itemsize != 2:
        raise ValueError(f"wire_dtype={wire_dtype} must be torch.bfloat16 or torch.float16")
