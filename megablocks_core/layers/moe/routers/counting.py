"""How many tokens chose each expert, without a value on the host."""

import torch
from torch import Tensor


def count_choices(indices: Tensor, num_experts: int) -> Tensor:
    """How often each expert stands in ``indices`` [E], int64; negative ones count nowhere."""
    chosen = indices.reshape(-1)
    keys = torch.where(chosen < 0, num_experts, chosen).sort().values
    bounds = torch.arange(num_experts + 1, device=keys.device)
    return torch.searchsorted(keys, bounds).diff()
