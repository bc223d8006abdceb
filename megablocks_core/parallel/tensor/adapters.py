"""Low-rank adapters beside a layer's weight (LoRA, https://arxiv.org/abs/2106.09685, section 4).

An adapter adds ``scale * B A x`` to a layer's product ``W x``. Where ``W`` is cut over ranks,
one factor is cut with it and the other is whole:

======================= =========== =========== =======================
layer                   A [R I]     B [O R]     added
======================= =========== =========== =======================
column (outputs cut)    whole       rows cut    to this rank's features
row (inputs cut)        columns cut whole       before the sum over ranks
embedding (rows cut)    columns cut whole       before the sum over ranks
======================= =========== =========== =======================

So the low-rank product needs no message of its own: the base's carries it. The whole factor
is used on a part, so its gradient is summed over the ranks; adapters of one block lend each
other one message for that. Under sequence parallelism a column layer's ``A`` reads this rank's
tokens alone, and only ``A x`` is gathered.

The adapter of a stack of matrices, such as the experts', has a pair of factors for each of them:
A [E R I] and B [E O R], cut as the stack is. The module that holds the stack computes with it.

Dimensions: T tokens, I input features (of an embedding: ids), O output features, R rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from megablocks_core.groups import (
    LOCAL,
    Group,
    ShardSpec,
    all_gather_to,
    copy_slices_to,
    copy_to,
    logical_shape,
    mark,
    specs_of,
)
from megablocks_core.parallel.initial import key_for, normal_, uniform_

Start = Literal["uniform", "normal", "zero"]


class LoraFactor(nn.Module):
    """One factor of an adapter: a matrix or a stack of them, or this rank's share of it.

    Args:
        weight: The matrix, or the stack.
        specs: Its cuts.
        start: How it starts: "uniform" as a linear layer's weight, "normal" or "zero".
        each: Names of the matrices of a stack, as ``mark`` takes them.
        expert: Its copies lie on the expert data-parallel group.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        specs: Sequence[ShardSpec],
        *,
        start: Start,
        each: str | None = None,
        expert: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.start = weight, start
        mark(self, "weight", *specs, each=each, expert=expert)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw the values; one seed is one adapter at any size, by the whole number of inputs."""
        specs = specs_of(self, "weight")
        if self.start == "zero":
            self.weight.zero_()
            return
        key = key_for(self.weight, f"{prefix}weight", seed)
        if self.start == "normal":
            normal_(self.weight, key=key, std=1.0, specs=specs)
        else:
            bound = logical_shape(self.weight, specs)[-1] ** -0.5
            uniform_(self.weight, key=key, low=-bound, high=bound, specs=specs)

    def extra_repr(self) -> str:
        """The whole shape."""
        return str(list(logical_shape(self.weight, specs_of(self, "weight"))))


@dataclass(eq=False)
class Adapter:
    """What stands beside one layer's weight, or beside a stack of weights.

    Attributes:
        a: The first factor.
        b: The second.
        alpha: Numerator of the scale.
        rslora: The scale is ``alpha / sqrt(rank)`` in place of ``alpha / rank``.
        embeds: The layer takes ids: ``A x`` is a column of ``A`` for each.
        group: The ranks that use a whole factor on their own part.
        summed: Whether the gradients of A and of B are parts of a sum over ``group``.
        shared: The cut of B, if neighbours hold the same slices of it.
        base: The weight before ``merge_lora``, which ``unmerge_lora`` puts back.
        lent: Factors whose gradients are summed in one message with others, while the module
            that holds the layers runs.
    """

    a: LoraFactor
    b: LoraFactor
    alpha: float
    rslora: bool
    embeds: bool
    group: Group = LOCAL
    summed: tuple[bool, bool] = (False, False)
    shared: ShardSpec | None = None
    base: Tensor | None = None
    lent: tuple[Tensor, Tensor] | None = None

    @property
    def rank(self) -> int:
        """R."""
        return self.a.weight.shape[-2]

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def merged(self) -> bool:
        """Whether the layer's weight holds the product already."""
        return self.base is not None

    @property
    def is_sharded(self) -> bool:
        """Whether a factor is one of ``fully_shard``'s slices now."""
        return any(hasattr(factor.weight, "full_tensor") for factor in (self.a, self.b))

    def add(self, y: Tensor, x: Tensor, padding_idx: int | None = None) -> Tensor:
        """``y + scale * B A x``, or ``y`` if merged."""
        return y if self.merged else self.up(y, self.down(x, padding_idx))

    def down(self, x: Tensor, padding_idx: int | None = None) -> Tensor:
        """``A x`` [... T R], from features [... T I] or ids [... T]."""
        a_RI = self._factor(0)
        if not self.embeds:
            return linear(x.to(a_RI.dtype), a_RI)
        if a_RI.shape[1] == 0:
            # A sum over no ids, so that the factors have gradients here too.
            return a_RI.sum(1).expand(*x.shape, -1)
        return embedding(x, a_RI.t(), padding_idx)

    def up(self, y: Tensor, h: Tensor) -> Tensor:
        """``y + scale * B h`` [... T O]."""
        return y + linear(h * self.scale, self._factor(1)).to(y.dtype)

    def added_weight(self) -> Tensor:
        """``scale * B A``, this rank's share, as the layer keeps its weight."""
        a_RI, b_OR = (_widened(factor.weight.detach()) for factor in (self.a, self.b))
        added_OI = (b_OR @ a_RI) * self.scale
        return added_OI.t() if self.embeds else added_OI

    def _factor(self, which: int) -> Tensor:
        return _copies([(self, which)])[0] if self.lent is None else self.lent[which]


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _copies(wanted: Sequence[tuple[Adapter, int]]) -> list[Tensor]:
    """Factors (0 is A, 1 is B) of adapters of one group, with gradients that will be whole.

    Backward sends one all-reduce for those that are used on a part, and one for slices that
    neighbours hold too.
    """
    factors = [(adapter.a, adapter.b)[which].weight for adapter, which in wanted]
    summed = [
        index
        for index, (adapter, which) in enumerate(wanted)
        if adapter.summed[which] and factors[index].requires_grad
    ]
    copies: list[Tensor] = list(factors)
    if summed:
        held = [factors[index] for index in summed]
        wire = reduce(torch.promote_types, (x.dtype for x in held), torch.float32)
        sums = copy_to(*held, group=wanted[summed[0]][0].group, reduce_dtype=wire)
        for index, copy in zip(summed, _listed(sums), strict=True):
            copies[index] = copy
    shared = {
        index: adapter.shared
        for index, (adapter, which) in enumerate(wanted)
        if which == 1 and adapter.shared is not None
    }
    if shared:
        held = [factors[index] for index in shared]
        for index, copy in zip(
            shared, copy_slices_to(*held, specs=list(shared.values())), strict=True
        ):
            copies[index] = copy
    return copies


def factor_copies(adapters: Sequence[Adapter]) -> list[tuple[Tensor, Tensor]]:
    """Both factors of adapters of one group, with gradients that will be whole.

    Backward sends one all-reduce for those that are used on a part.
    """
    copies = _copies([(adapter, which) for adapter in adapters for which in range(2)])
    return list(zip(copies[::2], copies[1::2], strict=True))


def _listed(tensors: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tensors


def with_adapters(
    ys: Sequence[Tensor],
    x: Tensor,
    adapters: Sequence[Adapter | None],
    *,
    tokens_over: Group = LOCAL,
) -> tuple[Tensor, ...]:
    """Products of one input, each with what its adapter adds.

    Args:
        ys: The products, of all tokens.
        x: The input: of all tokens, or of this rank's.
        adapters: The adapter of each product, if it has one.
        tokens_over: The ranks over which the tokens of ``x`` are cut, along dim -2: one
            all-gather of all ``A x`` forward, and its reduce-scatter backward.
    """
    adapters = [None if adapter is None or adapter.merged else adapter for adapter in adapters]
    hs = [adapter.down(x) for adapter in adapters if adapter is not None]
    if not hs:
        return tuple(ys)
    if tokens_over.size > 1:
        sizes = [x.shape[-2]] * tokens_over.size
        joined = all_gather_to(torch.cat(hs, dim=-1), dim=-2, group=tokens_over, sizes=sizes)
        hs = list(joined.split([h.shape[-1] for h in hs], dim=-1))
    left = iter(hs)
    return tuple(
        y if adapter is None else adapter.up(y, next(left))
        for y, adapter in zip(ys, adapters, strict=True)
    )


@dataclass(frozen=True, eq=False)
class Add:
    """After an ``nn.Linear`` or ``nn.Embedding``: add what the adapter makes of its input."""

    adapter: Adapter

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        """Replace the output."""
        x = args[0] if args else kwargs["input"]
        padding = module.padding_idx if isinstance(module, nn.Embedding) else None
        return self.adapter.add(output, x, padding)


@dataclass(frozen=True, eq=False)
class Lend:
    """Before the module that holds several adapted layers: one message for all their sums.

    A layer that is called from elsewhere sums its own, and so does one that ``fully_shard`` has
    cut by itself, whose factors are not here yet.
    """

    adapters: tuple[Adapter, ...]

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Hand out copies of the factors."""
        adapters = [x for x in self.adapters if not (x.merged or x.is_sharded)]
        for adapter, copies in zip(adapters, factor_copies(adapters), strict=True):
            adapter.lent = copies


@dataclass(frozen=True, eq=False)
class TakeBack:
    """After that module, also if it raised."""

    adapters: tuple[Adapter, ...]

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Let the copies go."""
        for adapter in self.adapters:
            adapter.lent = None


def adapter_of(layer: nn.Module) -> Adapter | None:
    """The adapter of a layer, merged or not."""
    adapter = layer.__dict__.get("adapter")
    return adapter if isinstance(adapter, Adapter) else None


def stack_adapters_of(module: nn.Module) -> dict[str, Adapter] | None:
    """The adapters of the stacks of ``module`` by the names of these, if it serves adapters.

    A module that does has an attribute ``stack_adapters``, a dict that starts empty. To each
    product with a stack that has an adapter there, which is not merged, it adds
    ``scale * B A x`` with factors from ``factor_copies``.
    """
    adapters = module.__dict__.get("stack_adapters")
    return adapters if isinstance(adapters, dict) else None


def adapted_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    """Yield (name, layer, adapter) for every adapted layer of ``module``."""
    for name, layer in module.named_modules():
        adapter = adapter_of(layer)
        if adapter is not None:
            yield name, layer, adapter
