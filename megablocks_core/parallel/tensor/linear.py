"""Tensor-parallel linear layers (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3;
sequence parallelism: https://arxiv.org/abs/2205.05198, section 4.2).

Dimensions: T tokens, I input features, O output features. A lowercase letter is this
rank's share of the capital one: o = O / group.size.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    ShardSpec,
    copy_slices_to,
    copy_to,
    gather_from,
    load_slices,
    mark,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
    specs_of,
    whole_tensor,
)
from megablocks_core.parallel.initial import key_for, uniform_
from megablocks_core.parallel.tensor.adapters import Adapter, with_adapters
from megablocks_core.parallel.tensor.products import column_products


class ColumnParallelLinear(nn.Module):
    """Linear layer whose output features are split over ``group``.

    Maps ``x`` [T I], equal on every rank, to this rank's slice ``y`` [T o]; over ``LOCAL``
    it is ``nn.Linear``. Forward sends nothing; backward all-reduces the gradient of ``x``
    once, while the weight gradient is computed. Under sequence parallelism ``x`` is this
    rank's tokens [T/size I]: forward all-gathers them, backward gathers them again and
    reduce-scatters the gradient. Saved for backward: ``x`` as it came and the parameter
    itself; no ``x`` if the weight is frozen. A second derivative raises over several ranks.

    Args:
        in_features: I.
        out_features: O.
        bias: Add a bias, cut as the outputs are.
        gather_output: All-gather ``y`` to [T O]; all ranks must go on with it alike.
        sequence_parallel: The ranks hold equal slices of the tokens, along dim -2.
        segments: Packed parts of the output features (q|k|v, gate|up), each cut on its own.
        uneven: Cut as ``torch.chunk`` does: later ranks may hold fewer features, or none. Else
            sizes that do not divide raise. For vocabularies of any size.
        group: The tensor-parallel ranks.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: A size does not divide evenly, or ``segments`` do not add up.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        segments: Sequence[Segment] | None = None,
        uneven: bool = False,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self.group = group
        self.spec = _spec(0, out_features, segments, group)
        if not uneven:
            _require_even(self.spec, "out_features", packed=segments is not None)
        rows = self.spec.held_length(out_features)
        self.weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        bias_o = torch.empty(rows, device=device, dtype=dtype) if bias else None
        self.bias = None if bias_o is None else nn.Parameter(bias_o)
        mark(self, "weight", self.spec)
        if bias:
            mark(self, "bias", self.spec)
        self.adapter: Adapter | None = None
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        whole: nn.Linear,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        segments: Sequence[Segment] | None = None,
        uneven: bool = False,
        group: Group = LOCAL,
    ) -> Self:
        """This rank's share of a whole linear layer, equal on every rank; sends nothing."""
        share = cls(
            whole.in_features,
            whole.out_features,
            bias=whole.bias is not None,
            gather_output=gather_output,
            sequence_parallel=sequence_parallel,
            segments=segments,
            uneven=uneven,
            group=group,
            device="meta",
        )
        _take_share(share, whole)
        return share

    def to_linear(self) -> nn.Linear:
        """The whole layer, on every rank: all-gathers the weight and the bias."""
        return _to_linear(self)

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw weight and bias as ``nn.Linear`` does; one seed is one model at any size."""
        _reset(self, seed, prefix)

    def forward(self, x_TI: Tensor) -> Tensor:
        """``x W^T + b``: this rank's features, or all if gathered."""
        if self.group.size == 1 and self.adapter is None:
            return linear(x_TI, self.weight, self.bias)
        return column_linears(x_TI, self)[0]

    def extra_repr(self) -> str:
        """The whole sizes and the number of ranks."""
        return _describe(self)


class RowParallelLinear(nn.Module):
    """Linear layer whose input features are split over ``group``.

    Maps this rank's slice ``x`` [T i] to the whole ``y`` [T O], equal on every rank; over
    ``LOCAL`` it is ``nn.Linear``. Forward all-reduces ``y`` once and then adds the bias;
    backward sends nothing. Under sequence parallelism forward reduce-scatters ``y`` to this
    rank's tokens [T/size O], and backward all-gathers its gradient and all-reduces that of
    the bias. Saved for backward: ``x`` and the parameter itself.

    Args:
        in_features: I.
        out_features: O.
        bias: Add a bias, held whole by every rank.
        input_is_parallel: ``x`` is this rank's slice; else it is whole and cut here.
        sequence_parallel: The ranks go on with equal slices of the tokens, along dim -2.
        segments: Packed parts of the input features, each cut on its own.
        group: The tensor-parallel ranks.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: A size does not divide evenly, or ``segments`` do not add up. In
            ``forward``: the number of tokens does not divide evenly under sequence
            parallelism.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        segments: Sequence[Segment] | None = None,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        self.group = group
        self.spec = _spec(1, in_features, segments, group)
        _require_even(self.spec, "in_features", packed=segments is not None)
        if self.spec.has_copies:
            raise ValueError(f"segments={segments} of a row-parallel layer must not set parts")
        columns = self.spec.held_length(in_features)
        self.weight = nn.Parameter(torch.empty(out_features, columns, device=device, dtype=dtype))
        bias_O = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        self.bias = None if bias_O is None else nn.Parameter(bias_O)
        mark(self, "weight", self.spec)
        self.adapter: Adapter | None = None
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        whole: nn.Linear,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        segments: Sequence[Segment] | None = None,
        group: Group = LOCAL,
    ) -> Self:
        """This rank's share of a whole linear layer, equal on every rank; sends nothing."""
        share = cls(
            whole.in_features,
            whole.out_features,
            bias=whole.bias is not None,
            input_is_parallel=input_is_parallel,
            sequence_parallel=sequence_parallel,
            segments=segments,
            group=group,
            device="meta",
        )
        _take_share(share, whole)
        return share

    def to_linear(self) -> nn.Linear:
        """The whole layer, on every rank: all-gathers the weight."""
        return _to_linear(self)

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw weight and bias as ``nn.Linear`` does; one seed is one model at any size."""
        _reset(self, seed, prefix)

    def forward(self, x_Ti: Tensor) -> Tensor:
        """``x W^T + b``: whole, or this rank's tokens of it."""
        if self.group.size == 1:
            y_TO = linear(x_Ti, self.weight, self.bias)
            return y_TO if self.adapter is None else self.adapter.add(y_TO, x_Ti)
        if not self.input_is_parallel:
            x_Ti = cut_features(x_Ti, self.spec)
        y_TO, bias_O = linear(x_Ti, self.weight), self.bias
        if self.adapter is not None:
            y_TO = self.adapter.add(y_TO, x_Ti)
        if not self.sequence_parallel:
            y_TO = reduce_from(y_TO, group=self.group)
        else:
            require_even_tokens(x_Ti, self.group)
            y_TO = reduce_scatter_to(y_TO, dim=-2, group=self.group)
            if bias_O is not None:
                bias_O = copy_to(bias_O, group=self.group)
        return y_TO if bias_O is None else y_TO + bias_O.to(y_TO.dtype)

    def extra_repr(self) -> str:
        """The whole sizes and the number of ranks."""
        return _describe(self)


def column_linears(x_TI: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """Several column-parallel layers on one input, with the messages of one layer.

    Query, key and value, or gate and up, read the same ``x``: one all-gather forward under
    sequence parallelism, and one all-reduce or reduce-scatter of the summed gradient
    backward, while the weight gradients are computed. Adapters join these messages; under
    sequence parallelism their low-rank features cost a small all-gather and reduce-scatter.

    Raises:
        ValueError: The layers differ in ``group`` or ``sequence_parallel``.
    """
    first = layers[0]
    for layer in layers:
        if (layer.group, layer.sequence_parallel) != (first.group, first.sequence_parallel):
            raise ValueError("layers must agree on group and sequence_parallel")
    adapters = [layer.adapter for layer in layers]
    if first.group.size == 1:
        ys_TO = [linear(x_TI, layer.weight, layer.bias) for layer in layers]
        return with_adapters(ys_TO, x_TI, adapters)
    group, sequence_parallel = first.group, first.sequence_parallel
    weights, biases = _weights_and_biases(layers)
    if sequence_parallel or not any(adapters):
        ys_To = column_products(
            x_TI, weights, biases, group=group, sequence_parallel=sequence_parallel
        )
    else:
        # One all-reduce carries the gradient that products and adapters give their input.
        x_TI = copy_to(x_TI, group=group)
        ys_To = [linear(x_TI, *pair) for pair in zip(weights, biases, strict=True)]
    tokens_over = group if sequence_parallel else LOCAL
    ys_To = with_adapters(ys_To, x_TI, adapters, tokens_over=tokens_over)
    return tuple(
        gather_features(y_To, layer.spec) if layer.gather_output else y_To
        for y_To, layer in zip(ys_To, layers, strict=True)
    )


def _weights_and_biases(
    layers: Sequence[ColumnParallelLinear],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The layers' parameters; slices that neighbours hold too sum their gradients."""
    held = [(layer, parameter) for layer in layers for parameter in (layer.weight, layer.bias)]
    shared = [
        (index, parameter, layer.spec)
        for index, (layer, parameter) in enumerate(held)
        if parameter is not None and layer.spec.has_copies
    ]
    parameters: list[Any] = [parameter for _, parameter in held]
    if shared:
        indices, tensors, specs = zip(*shared, strict=True)
        for index, copy in zip(indices, copy_slices_to(*tensors, specs=specs), strict=True):
            parameters[index] = copy
    return parameters[::2], parameters[1::2]


def gather_features(y_To: Tensor, spec: ShardSpec) -> Tensor:
    """All ranks' features [... O] from this rank's [... o], cut by ``spec``.

    One all-gather; backward keeps this rank's part of the gradient, so all ranks must go on
    with the whole alike. Packed parts come in the order of the whole, and slices that
    neighbours hold too are taken once.
    """
    whole_length = spec.whole_length(y_To.shape[-1])
    shares = [spec.ranges(whole_length, rank) for rank in range(spec.group.size)]
    sizes = [spec.held_length(whole_length, rank) for rank in range(spec.group.size)]
    y_TO = gather_from(y_To, dim=-1, group=spec.group, sizes=sizes)
    if len(shares[0]) == 1 and not spec.has_copies:
        return y_TO
    start, pieces = 0, {}
    for share in shares:
        for part in share:
            length = part.stop - part.start
            pieces.setdefault(part.start, y_TO.narrow(-1, start, length))
            start += length
    return torch.cat([pieces[first] for first in sorted(pieces)], dim=-1)


def cut_features(x_TI: Tensor, spec: ShardSpec) -> Tensor:
    """This rank's features of a whole ``x`` that every rank holds."""
    parts = spec.ranges(x_TI.shape[-1])
    if len(parts) == 1:
        return scatter_to(x_TI, dim=-1, group=spec.group)
    x_TI = copy_to(x_TI, group=spec.group)
    return torch.cat([x_TI[..., part] for part in parts], dim=-1)


def _spec(dim: int, length: int, segments: Sequence[Segment] | None, group: Group) -> ShardSpec:
    packed = (Segment(length),) if segments is None else tuple(segments)
    if sum(segment.size for segment in packed) != length:
        raise ValueError(f"segments={packed} must add up to {length} features")
    return ShardSpec(dim, group, packed)


def _require_even(spec: ShardSpec, name: str, *, packed: bool) -> None:
    for segment in spec.segments or ():
        if segment.size % (segment.parts or spec.group.size):
            what = f"a segment of {name}" if packed else name
            raise ValueError(
                f"{what}={segment.size} must divide evenly over a group of {spec.group.size} ranks"
            )


def require_even_tokens(x: Tensor, group: Group) -> None:
    """Raise ``ValueError`` if tokens along dim -2 do not divide evenly over ``group``."""
    if x.dim() < 2 or x.shape[-2] % group.size:
        count = x.shape[-2] if x.dim() > 1 else "no"
        raise ValueError(
            f"x of shape {tuple(x.shape)} has {count} tokens along dim -2, which must divide "
            f"evenly over a group of {group.size} ranks under sequence parallelism"
        )


def _reset(layer: ColumnParallelLinear | RowParallelLinear, seed: int | None, prefix: str) -> None:
    bound = layer.in_features**-0.5 if layer.in_features else 0.0
    for name, parameter in layer.named_parameters(recurse=False):
        key = key_for(parameter, prefix + name, seed)
        uniform_(parameter, key=key, low=-bound, high=bound, specs=specs_of(layer, name))


def _take_share(layer: ColumnParallelLinear | RowParallelLinear, whole: nn.Linear) -> None:
    """Fill a layer built on ``meta`` with this rank's share, dtype and device of ``whole``."""
    layer.to_empty(device=whole.weight.device)
    layer.train(whole.training)
    for name, parameter in whole.named_parameters(recurse=False):
        share = getattr(layer, name)
        share.data = share.data.to(parameter.dtype)
        share.requires_grad_(parameter.requires_grad)
        if not parameter.is_meta:
            load_slices(share, specs_of(layer, name), parameter)


def _to_linear(layer: ColumnParallelLinear | RowParallelLinear) -> nn.Linear:
    whole = nn.Linear(
        layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
    )
    for name, share in layer.named_parameters(recurse=False):
        tensor = whole_tensor(share, specs_of(layer, name)).clone()
        setattr(whole, name, nn.Parameter(tensor, requires_grad=share.requires_grad))
    return whole.train(layer.training)


def _describe(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, "
        f"bias={layer.bias is not None}, ranks={layer.group.size}"
    )
