"""Weights of a causal depthwise convolution, cut as its channels are.

Dimensions: C channels, W taps. A lowercase letter is this rank's share of the capital one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, Segment, ShardSpec, copy_slices_to, mark, specs_of
from megablocks_core.parallel.initial import key_for, uniform_


class DepthwiseConv1d(nn.Module):
    """Weight [c 1 W] and bias [c], named and shaped as those of ``nn.Conv1d``.

    It has no ``forward``: a mixer hands the weights to the convolution that it was built with.

    Args:
        channels: C.
        width: W.
        bias: Whether there is a bias.
        segments: Packed parts of the channels, each cut on its own.
        group: The tensor-parallel ranks.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        bias: bool = True,
        segments: Sequence[Segment] | None = None,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec = ShardSpec(0, group, None if segments is None else tuple(segments))
        own = self.spec.held_length(channels)
        self.weight = nn.Parameter(torch.empty(own, 1, width, device=device, dtype=dtype))
        bias_c = torch.empty(own, device=device, dtype=dtype) if bias else None
        self.bias = None if bias_c is None else nn.Parameter(bias_c)
        mark(self, "weight", self.spec)
        if bias:
            mark(self, "bias", self.spec)
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw weight and bias as ``nn.Conv1d`` does; one seed is one model at any size."""
        bound = self.weight.shape[-1] ** -0.5
        for name, parameter in self.named_parameters(recurse=False):
            key = key_for(parameter, prefix + name, seed)
            uniform_(parameter, key=key, low=-bound, high=bound, specs=specs_of(self, name))

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight [c W] and bias [c] for use on this rank's channels.

        Backward sums the gradients of channels that neighbours hold too, in one message.
        """
        if self.bias is None:
            (weight,) = copy_slices_to(self.weight, specs=[self.spec])
            return weight.squeeze(1), None
        weight, bias = copy_slices_to(self.weight, self.bias, specs=[self.spec, self.spec])
        return weight.squeeze(1), bias

    def extra_repr(self) -> str:
        """Sizes of this rank's share."""
        channels, _, width = self.weight.shape
        return f"{channels}, width={width}, bias={self.bias is not None}"
