"""What a rounded layer keeps between steps: scales and histories of amaxes, or a counter of draws.

Buffers of a layer's child ``fp8``, so that checkpoints hold them as plain tensors. A checkpoint
without them, of a model that was trained in more bits, leaves fresh ones.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, ShardSpec, mark
from megablocks_core.numbers.formats import E4M3, E5M2, Float
from megablocks_core.numbers.scaling import delayed_scale
from megablocks_core.parallel.recipes.recipe import NVFP4, DelayedScaling, Recipe


class State(nn.Module):
    """Base of all kinds: loaded or fresh, and as wide as it was when the module around is cast."""

    @abstractmethod
    def reset(self) -> None:
        """As before the first step."""

    def _apply(self, fn: Any, recurse: bool = True) -> State:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

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


class ScaleState(State):
    """Scales [N] and histories of amaxes [L N], float32, as Transformer Engine lays them out.

    Of each product there are three tensors forward (input, weight, output), and two backward
    (gradient of the output, gradient of the input). Row 0 of a history is the step that runs, the
    last row the one before it.

    Args:
        length: L.
        num_products: How many, here; of experts one an expert.
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
        place: dict[str, Any] = {"device": device, "dtype": torch.float32}
        for direction, each in (("fwd", 3), ("bwd", 2)):
            count = each * num_products
            self.register_buffer(f"scale_{direction}", torch.empty(count, **place))
            history_LN = torch.empty(length, count, **place)
            self.register_buffer(f"amax_history_{direction}", history_LN)
            if group.size > 1:
                mark(self, f"scale_{direction}", ShardSpec(0, group), expert=True)
                mark(self, f"amax_history_{direction}", ShardSpec(1, group), expert=True)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Scales of 1, and no history."""
        for name, buffer in self.named_buffers():
            buffer.fill_(1.0 if name.startswith("scale") else 0.0)


class DelayedState(ScaleState):
    """Scales of delayed scaling, and the amaxes that they are made from.

    Checkpoints of it and of Transformer Engine's layers are alike. The output of forward and the
    gradient of the input have places that are not used.

    Args:
        recipe: What makes the scales.
        num_products: P, as of ``ScaleState``.
        group: The same.
        device: Of the buffers.
    """

    def __init__(
        self,
        recipe: DelayedScaling,
        num_products: int = 1,
        *,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(recipe.amax_history_len, num_products, group=group, device=device)
        self.recipe = recipe

    def forward_scales(self) -> Tensor:
        """The scales [P 2] of inputs and weights, as they are."""
        return self.scale_fwd.view(-1, 3)[:, :2].clone()

    def step_forward(self, amaxes: Tensor) -> Tensor:
        """The same, of this step; its ``amaxes`` [P 2] make the next ones."""
        return _step(self.scale_fwd, self.amax_history_fwd, amaxes, self.recipe, E4M3)

    def step_backward(self, amaxes: Tensor) -> Tensor:
        """The scales of the gradients of outputs [P 1], by their ``amaxes``."""
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


def state_for(
    recipe: Recipe | None,
    *,
    num_products: int = 1,
    group: Group = LOCAL,
    device: torch.device | str | None = None,
) -> State | None:
    """What a layer must keep for a recipe; nothing for most.

    Args:
        recipe: The layer's.
        num_products: How many products with scales of their own it computes; one an expert.
        group: Ranks that share the products, in order.
        device: Of the buffers.
    """
    if isinstance(recipe, DelayedScaling):
        return DelayedState(recipe, num_products, group=group, device=device)
    if isinstance(recipe, NVFP4) and recipe.stochastic_rounding:
        return DrawState(device=device)
    return None


def _step(
    scales: Tensor, history: Tensor, amaxes: Tensor, recipe: DelayedScaling, to: Float
) -> Tensor:
    products, count = amaxes.shape
    now = scales.view(products, -1)[:, :count].clone()
    history[0].view(products, -1)[:, :count] = amaxes
    amax = history.amax(0) if recipe.amax_algorithm == "max" else history[0].clone()
    history.copy_(history.roll(-1, 0))
    history[0] = 0.0
    scales.copy_(delayed_scale(amax, scales, to, margin=recipe.margin))
    return now
