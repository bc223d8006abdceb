"""What a rounded layer keeps between steps: scales and histories of amaxes, or a counter of draws.

Buffers of a layer's child ``fp8``, so that checkpoints hold them as plain tensors. A checkpoint
without them, of a model that was trained in more bits, leaves fresh ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.parallel.recipes.formats import E4M3, E5M2, Float
from megablocks_core.parallel.recipes.recipe import NVFP4, DelayedScaling, Recipe
from megablocks_core.parallel.recipes.scaling import delayed_scale


class State(nn.Module):
    """Base of the two kinds."""

    def reset(self) -> None:
        """As before the first step."""
        raise NotImplementedError

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if not any(prefix + name in state_dict for name in self._buffers):
            self.reset()
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class DelayedState(State):
    """Scales of delayed scaling, and the amaxes that they are made from.

    The layout is Transformer Engine's, so that checkpoints of both are alike: columns for input,
    weight and output, and for the gradients of output and input. The third and the last are not
    used. Row 0 of a history is the step that runs, the last row the one before it.

    Args:
        recipe: What makes the scales.
        device: Of the buffers.
    """

    scale_fwd: Tensor
    amax_history_fwd: Tensor
    scale_bwd: Tensor
    amax_history_bwd: Tensor

    def __init__(self, recipe: DelayedScaling, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.recipe = recipe
        for suffix, count in (("fwd", 3), ("bwd", 2)):
            scale = torch.ones(count, device=device)
            history = torch.zeros(recipe.amax_history_len, count, device=device)
            self.register_buffer(f"scale_{suffix}", scale)
            self.register_buffer(f"amax_history_{suffix}", history)

    def reset(self) -> None:
        """Scales of 1, and no history."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                buffer.fill_(1.0 if name.startswith("scale") else 0.0)

    def step_forward(self, amaxes: Tensor) -> Tensor:
        """The scales [2] of this step's input and weight; their ``amaxes`` make the next."""
        return _step(self.scale_fwd, self.amax_history_fwd, amaxes, self.recipe, E4M3)

    def step_backward(self, amaxes: Tensor) -> Tensor:
        """The same for the gradient of the output [1]."""
        to = E5M2 if self.recipe.format == "hybrid" else E4M3
        return _step(self.scale_bwd, self.amax_history_bwd, amaxes, self.recipe, to)


class DrawState(State):
    """A key and how often it was drawn from: two integers that name all chances of a layer."""

    key: Tensor
    draws: Tensor

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("key", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64, device=device))

    def reset(self) -> None:
        """No draws; the key stays."""
        self.draws.zero_()

    def draw(self) -> Tensor:
        """The number of this draw; the next is another."""
        number = self.draws.clone()
        self.draws.add_(1)
        return number


def state_for(recipe: Recipe | None, *, device: torch.device | str | None = None) -> State | None:
    """What a layer must keep for a recipe; nothing for most."""
    if isinstance(recipe, DelayedScaling):
        return DelayedState(recipe, device=device)
    if isinstance(recipe, NVFP4) and recipe.stochastic_rounding:
        return DrawState(device=device)
    return None


def _step(
    scales: Tensor, history: Tensor, amaxes: Tensor, recipe: DelayedScaling, to: Float
) -> Tensor:
    count = len(amaxes)
    now = scales[:count].clone()
    history[0, :count] = amaxes
    amax = history.amax(0) if recipe.amax_algorithm == "max" else history[0].clone()
    history.copy_(history.roll(-1, 0))
    history[0] = 0.0
    scales.copy_(delayed_scale(amax, scales, to, margin=recipe.margin))
    return now
