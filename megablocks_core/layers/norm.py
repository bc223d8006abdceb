"""Normalisation layers, at least float32 inside.

RMS norm: Zhang and Sennrich, https://arxiv.org/abs/1910.07467. Layer norm: Ba et al.,
https://arxiv.org/abs/1607.06450.

Dimensions: T tokens, H features.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from megablocks_core.groups import Group, copy_to


class RMSNorm(nn.Module):
    """``y = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Maps ``x`` [... H] to ``y`` [... H] and sends nothing. On a part of the tokens or heads
    (sequence parallelism, norms of query and key heads) use it through ``on_part``.

    Args:
        hidden_size: H.
        eps: Added under the root.
        zero_centered: ``1 + weight`` takes the place of ``weight``, whose values lie around zero.
        device: Of the parameter.
        dtype: Of the parameter.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-6,
        zero_centered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Set what features are multiplied by to one, whatever the seed."""
        self.weight.fill_(0 if self.zero_centered else 1)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if not self.zero_centered:
            return F.rms_norm(x_TH, self.weight.shape, self.weight, self.eps)
        # A narrow sum with one would lose the small weights.
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)
        return F.rms_norm(x_TH.to(wide), self.weight.shape, scale, self.eps).to(x_TH.dtype)

    def extra_repr(self) -> str:
        """Size, eps and where weights lie."""
        around = ", zero_centered=True" if self.zero_centered else ""
        return f"{self.weight.shape[0]}, eps={self.eps}{around}"


class LayerNorm(nn.Module):
    """``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension.

    Maps ``x`` [... H] to ``y`` [... H] and sends nothing. On a part of the tokens or heads
    use it through ``on_part``.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Set the weight to one and the bias to zero, whatever the seed."""
        self.weight.fill_(1)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x_TH: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.layer_norm(x_TH, self.weight.shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Size, eps and whether there is a bias."""
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


def on_part(*modules: nn.Module, group: Group) -> list[Callable[[Tensor], Tensor]]:
    """The modules, for use where each rank of ``group`` has its own tokens or heads.

    There the gradient of a replicated weight is a part of a sum. All weights of all modules
    pass through one ``copy_to``, so backward all-reduces them in one message. Over a group of
    one these are the modules themselves.

    Args:
        *modules: Norms, or any modules from tensor to tensor with replicated parameters.
        group: The ranks.
    """
    if group.size == 1 or not modules:
        return list(modules)
    names = [[name for name, _ in module.named_parameters()] for module in modules]
    whole = iter(
        _copies([weight for module in modules for weight in module.parameters()], group=group)
    )
    return [
        partial(_call, module, {name: next(whole) for name in own})
        for module, own in zip(modules, names, strict=True)
    ]


def _copies(weights: list[nn.Parameter], *, group: Group) -> tuple[Tensor, ...]:
    copies = copy_to(*weights, group=group)
    return copies if isinstance(copies, tuple) else (copies,)


def _call(module: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(module, weights, (x,))
