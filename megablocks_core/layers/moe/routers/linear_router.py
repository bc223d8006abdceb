"""What routers with a weight have in common: logits, and what of a router stays float32.

Dimensions: T tokens of this rank, H features, E experts.
"""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from megablocks_core.groups import LOCAL, Group, check_group, copy_to
from megablocks_core.layers.moe.routers.jitter import Jitter
from megablocks_core.layers.moe.routers.scores import precise
from megablocks_core.layers.moe.routing import Routing
from megablocks_core.parallel.checks import check_whole
from megablocks_core.parallel.initial import key_for, normal_


class LinearRouter(nn.Module, ABC):
    """Logits are ``x weight^T + bias``, computed in float32 at least, whatever is cast around.

    Buffers stay float32 when the module is converted: a selection bias moves by small steps.
    Nothing is sent forward; where ranks of ``group`` hold different tokens, backward all-reduces
    the gradients of weight and bias in one message. Saved for backward of the logits: ``x`` and
    the weight as they came.

    Args:
        hidden_size: H.
        num_experts: E.
        bias: Add a bias to the logits.
        jitter: Of what the router reads, in training.
        group: Tensor-parallel ranks that hold different tokens (sequence parallelism).
        device: Of the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        bias: bool = False,
        jitter: Jitter | None = None,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_group(group)
        check_whole("hidden_size", hidden_size, least=1)
        check_whole("num_experts", num_experts, least=1)
        self.hidden_size, self.num_experts = hidden_size, num_experts
        if jitter is not None and not isinstance(jitter, nn.Module):
            raise ValueError(f"jitter={jitter!r} must be a Jitter")
        self.group, self.jitter = group, jitter
        weight_EH = torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight_EH)
        self.bias = nn.Parameter(torch.empty_like(weight_EH[:, 0])) if bias else None

    @abstractmethod
    def forward(
        self, x_TH: Tensor, *, mask: Tensor | None = None, index: Tensor | None = None
    ) -> Routing:
        """Route the tokens.

        Args:
            x_TH: Tokens [T H].
            mask: True for tokens that count [T].
            index: A word a token from ``DropoutKey.index`` [T], if the router jitters.
        """

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Normal values of deviation H^-0.5; biases and buffers are 0."""
        key = key_for(self.weight, f"{prefix}weight", seed)
        normal_(self.weight, key=key, std=self.weight.shape[1] ** -0.5)
        for zero in (self.bias, *self.buffers(recurse=False)):
            if zero is not None:
                zero.zero_()

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load, and keep the buffers in float32 also where tensors are taken as they come."""
        dtypes = {
            name: buffer.dtype for name, buffer in self._buffers.items() if buffer is not None
        }
        super()._load_from_state_dict(*args)
        for name, dtype in dtypes.items():
            buffer = self._buffers[name]
            if buffer is not None and buffer.dtype != dtype:
                self._buffers[name] = buffer.to(dtype)

    def logits(self, x_TH: Tensor, *, index: Tensor | None = None) -> Tensor:
        """[T E], in float32 at least."""
        if self.jitter is not None:
            x_TH = self.jitter(x_TH, index=index)
        weights = [self.weight] if self.bias is None else [self.weight, self.bias]
        if self.group.size > 1:
            copies = copy_to(*weights, group=self.group)
            weights = [copies] if isinstance(copies, Tensor) else list(copies)
        with torch.autocast(x_TH.device.type, enabled=False):
            return _logits(x_TH, *weights)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.weight.shape[1]}, num_experts={self.num_experts}"

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or convert, but keep the buffers in float32."""
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in kept.items():
            now = self._buffers[name]
            if before is not None and now is not None and now.dtype != before.dtype:
                empty = before.is_meta or now.is_meta
                self._buffers[name] = now.to(before.dtype) if empty else before.to(now.device)
        return self


def _logits(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None = None) -> Tensor:
    bias_E = None if bias_E is None else precise(bias_E)
    if precise(x_TH).dtype == x_TH.dtype == weight_EH.dtype:
        return linear(x_TH, weight_EH, bias_E)
    logits_TE = _Product.apply(x_TH, weight_EH)
    return logits_TE if bias_E is None else logits_TE + bias_E


def _wide(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return x.to(dtype), weight.to(dtype)


class _Product(torch.autograd.Function):
    """``x weight^T`` in float32 at least, of which the narrow tensors are saved."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        return linear(*_wide(x_TH, weight_EH))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weight_EH = ctx.saved_tensors
        wide_x, wide_weight = _wide(x_TH, weight_EH)
        dx = (dy_TE @ wide_weight).to(x_TH.dtype) if ctx.needs_input_grad[0] else None
        dw = (dy_TE.T @ wide_x).to(weight_EH.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw
