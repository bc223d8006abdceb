"""How many tokens chose each expert, and in which order, without a value on the host.

Dimensions: T tokens, k slots a token, E experts.
"""

import torch
from torch import Tensor

# Up to so many comparisons a token, comparing is faster than a sort.
_FEW = 4096


def count_choices(indices_Tk: Tensor, num_experts: int) -> Tensor:
    """How often each expert stands in ``indices`` [E], int64; negative ones count nowhere."""
    if indices_Tk.shape[-1] * num_experts > _FEW:
        keys = sort_keys(indices_Tk, num_experts).sort().values
        return bounds(keys, num_experts).diff()
    experts = torch.arange(num_experts, device=indices_Tk.device)
    return (indices_Tk.reshape(-1) == experts.unsqueeze(-1)).sum(1)


def queue_places(indices: Tensor, num_experts: int, *, by: Tensor | None = None) -> Tensor:
    """Each slot's place in the queue before its expert, from 0 on; as ``indices``, int64.

    Args:
        indices: Experts; slots with negative ones stand in a queue of their own.
        num_experts: E.
        by: Higher values stand in front, and of equal ones the earlier slot; default: the order
            of the slots.
    """
    keys = sort_keys(indices, num_experts)
    order = torch.arange(keys.shape[0], device=keys.device)
    if by is not None:
        order = by.detach().reshape(-1).sort(descending=True, stable=True).indices
    keys, inner = keys[order].sort(stable=True)
    starts = bounds(keys, num_experts)
    inside = torch.arange(keys.shape[0], device=keys.device) - starts[keys]
    return inside[order[inner].argsort()].view_as(indices)


def sort_keys(indices: Tensor, num_experts: int) -> Tensor:
    """The expert of each slot in one row, E where it has none: these come last in order."""
    chosen = indices.reshape(-1)
    return torch.where(chosen < 0, num_experts, chosen)


def bounds(keys: Tensor, num_experts: int) -> Tensor:
    """Where each expert's slots start in sorted keys, and where the last one's end [E+1]."""
    return torch.searchsorted(keys, torch.arange(num_experts + 1, device=keys.device))
