"""Which options of a reduction of gradients are right."""

from __future__ import annotations

import torch

from megablocks_core.groups import Group, check_group
from megablocks_core.parallel.checks import REDUCTIONS, check_choice, check_floating


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
    check_choice("reduction", reduction, REDUCTIONS)
    for name, dtype in (("reduce_dtype", reduce_dtype), ("wire_dtype", wire_dtype)):
        if dtype is not None:
            check_floating(name, dtype)
    if wire_dtype is not None and wire_dtype.itemsize != 2:
        raise ValueError(f"wire_dtype={wire_dtype} must be torch.bfloat16 or torch.float16")
