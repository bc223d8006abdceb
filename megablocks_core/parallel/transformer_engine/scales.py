"""Scales and histories of delayed scaling that Transformer Engine's modules update.

Dimensions: L steps of history, N tensors.
"""

from typing import Any

import torch

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.recipes.state import ScaleState

# Where a module of Transformer Engine keeps them: key of ``fp8_meta`` and attribute.
_HOMES = {
    "scale_fwd": ("scaling_fwd", "scale"),
    "amax_history_fwd": ("scaling_fwd", "amax_history"),
    "scale_bwd": ("scaling_bwd", "scale"),
    "amax_history_bwd": ("scaling_bwd", "amax_history"),
}


class Scales(ScaleState):
    """``ScaleState`` that is shared with a module: while it runs, it updates these very tensors.

    Args:
        length: L.
        num_products: How many, here; of experts one an expert.
        group: Ranks that share the products, in order.
        device: Of the buffers.
    """

    def __init__(
        self,
        length: int,
        num_products: int = 1,
        *,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(length, num_products, group=group, device=device)
        self.length = length

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Start anew, whatever the seed."""
        self.reset()

    @torch.no_grad()
    def share_with(self, meta: dict[str, Any]) -> None:
        """Give a module's ``fp8_meta`` these values; from now on both hold the same tensors."""
        for name, (key, attribute) in _HOMES.items():
            theirs, ours = getattr(meta[key], attribute), getattr(self, name)
            if theirs is not ours:
                theirs.copy_(ours)
                self._buffers[name] = theirs
