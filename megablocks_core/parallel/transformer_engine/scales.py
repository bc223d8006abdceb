"""Scales and histories of delayed scaling, as plain buffers that a state dict holds.

Dimensions: L steps of history, N tensors, of which each product has three forward (input, weight,
output) and two backward (gradient of the output, gradient of the input).
"""

from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, ShardSpec, mark

_FORWARD, _BACKWARD = 3, 2
# Where a module of Transformer Engine keeps them: key of ``fp8_meta`` and attribute.
_HOMES = {
    "scale_fwd": ("scaling_fwd", "scale"),
    "amax_history_fwd": ("scaling_fwd", "amax_history"),
    "scale_bwd": ("scaling_bwd", "scale"),
    "amax_history_bwd": ("scaling_bwd", "amax_history"),
}


class Scales(nn.Module):
    """Scales [N] and histories of amaxes [L N], float32 whatever the module around is cast to.

    While a module of Transformer Engine runs, they are the very tensors that it updates. Loading
    a state without them, of a model that had no such recipe, starts them anew.

    Args:
        length: L.
        num_products: Here; of experts one an expert.
        group: Ranks that share the products, in order.
        device: Of the buffers.
    """

    scale_fwd: Tensor
    amax_history_fwd: Tensor
    scale_bwd: Tensor
    amax_history_bwd: Tensor

    def __init__(
        self,
        length: int,
        num_products: int = 1,
        *,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.length = length
        for direction, each in (("fwd", _FORWARD), ("bwd", _BACKWARD)):
            count = each * num_products
            place = {"device": device, "dtype": torch.float32}
            self.register_buffer(f"scale_{direction}", torch.empty(count, **place))
            history_LN = torch.empty(length, count, **place)
            self.register_buffer(f"amax_history_{direction}", history_LN)
            if group.size > 1:
                mark(self, f"scale_{direction}", ShardSpec(0, group), expert=True)
                mark(self, f"amax_history_{direction}", ShardSpec(1, group), expert=True)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Scales of 1 and empty histories, whatever the seed."""
        for name in _HOMES:
            getattr(self, name).fill_(1 if name.startswith("scale") else 0)

    @torch.no_grad()
    def share_with(self, meta: dict[str, Any]) -> None:
        """Give a module's ``fp8_meta`` these values; from now on both hold the same tensors."""
        for name, (key, attribute) in _HOMES.items():
            theirs, ours = getattr(meta[key], attribute), getattr(self, name)
            if theirs is not ours:
                theirs.copy_(ours)
                self._buffers[name] = theirs

    def _apply(self, fn: Any, recurse: bool = True) -> "Scales":
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != torch.float32:
                self._buffers[name] = old.to(new.device)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if not any(prefix + name in state_dict for name in _HOMES):
            self.reset_parameters()
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
