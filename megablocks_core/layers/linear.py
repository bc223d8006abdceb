"""Projections of attention and feed-forward layers: how ``linear=`` builds them, and their use."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, Segment
from megablocks_core.parallel import ColumnParallelLinear, RowParallelLinear, column_linears

# Called as ``parallel_linear`` is.
LinearFactory = Callable[..., nn.Module]


def parallel_linear(
    in_features: int,
    out_features: int,
    *,
    parallel_mode: Literal["column", "row"],
    bias: bool = True,
    sequence_parallel: bool = False,
    segments: Sequence[Segment] | None = None,
    blank: bool = False,
    group: Group = LOCAL,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The default of every ``linear=``: a column- or a row-parallel layer.

    An injected callable takes the same arguments but ``blank``, which leaves memory without
    values, and returns a module from tensor to tensor that marks the parameters it cuts.
    """
    kind = ColumnParallelLinear if parallel_mode == "column" else RowParallelLinear
    layer = kind(
        in_features,
        out_features,
        bias=bias,
        sequence_parallel=sequence_parallel,
        segments=segments,
        group=group,
        device="meta" if blank else device,
        dtype=dtype,
    )
    if not blank:
        return layer
    return layer.to_empty(device=torch.get_default_device() if device is None else device)


# For a model that draws all its values at once.
blank_linear = partial(parallel_linear, blank=True)


def apply_each(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Outputs of several column-parallel layers that read the same ``x``.

    Our own layers share one message each way. Other layers, and layers with hooks or
    parametrizations, are called one by one.
    """
    if all(_is_plain(layer) for layer in layers):
        return column_linears(x, *layers)  # pyright: ignore[reportArgumentType]
    return tuple(layer(x) for layer in layers)


def _is_plain(layer: nn.Module) -> bool:
    """Whether calling ``layer`` does nothing but its class's ``forward``, over several ranks."""
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    return type(layer) is ColumnParallelLinear and layer.group.size > 1 and not any(hooks)
