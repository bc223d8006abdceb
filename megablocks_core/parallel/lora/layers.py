"""How an adapter is cut with its layer, and how it gets on and off.

Dimensions: I input features (of an embedding: ids), O output features.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from megablocks_core.groups import (
    LOCAL,
    Group,
    ShardSpec,
    load_slices,
    logical_shape,
    specs_of,
    whole_tensor,
)
from megablocks_core.groups.marking import clean_name
from megablocks_core.parallel.tensor.adapters import (
    Adapter,
    Add,
    Lend,
    LoraFactor,
    TakeBack,
    adapted_layers,
)
from megablocks_core.parallel.tensor.boundaries import take_off_hooks
from megablocks_core.parallel.tensor.embedding import VocabParallelEmbedding
from megablocks_core.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

_LINEAR = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
_EMBEDDING = (nn.Embedding, VocabParallelEmbedding)


class Place(NamedTuple):
    """How the adapter of one layer is cut.

    Attributes:
        shape: The layer's (O, I).
        a_specs: The cuts of A.
        b_specs: The cuts of B.
        group: The ranks.
        summed: Whether the gradients of A and B are parts of a sum over them.
        shared: The cut of B, if neighbours hold the same slices.
        embeds: The layer takes ids.
        stack: (E,) of a stack of E matrices.
    """

    shape: tuple[int, int]
    a_specs: tuple[ShardSpec, ...] = ()
    b_specs: tuple[ShardSpec, ...] = ()
    group: Group = LOCAL
    summed: tuple[bool, bool] = (False, False)
    shared: ShardSpec | None = None
    embeds: bool = False
    stack: tuple[int, ...] = ()


def place_of(name: str, layer: nn.Module) -> Place:
    """How the adapter of ``layer``, called ``name``, is to be cut.

    Raises:
        ValueError: The layer is not served.
    """
    # A kind of theirs that adds an adapter as they do says so.
    if type(layer) not in (*_LINEAR, *_EMBEDDING) and not getattr(
        type(layer), "adds_adapters", False
    ):
        served = ", ".join(kind.__name__ for kind in (*_LINEAR, *_EMBEDDING))
        raise ValueError(f"{name} is a {kind_of(layer)}; adapters are served on {served}")
    weight, specs = layer.get_parameter("weight"), specs_of(layer, "weight")
    embeds = isinstance(layer, _EMBEDDING)
    whole = logical_shape(weight, specs)
    shape = (whole[1], whole[0]) if embeds else (whole[0], whole[1])
    if not specs:
        # A whole layer may see this rank's heads or tokens alone.
        group: Group = getattr(layer, "summed_over", LOCAL)
        used_on_part = group.size > 1
        return Place(shape, group=group, summed=(used_on_part, used_on_part), embeds=embeds)
    spec, several = specs[0], specs[0].group.size > 1
    if len(specs) > 1 or (type(layer) is nn.Linear and spec.dim != 0):
        raise ValueError(f"{name}.weight is cut by {tuple(specs)}, which adapters do not serve")
    if embeds:
        columns = (replace(spec, dim=1),)
        return Place(shape, columns, (), spec.group, (False, several), embeds=True)
    if spec.dim == 1:
        return Place(shape, (spec,), (), spec.group, (False, several))
    shared = spec if spec.has_copies else None
    return Place(shape, (), (spec,), spec.group, (several, False), shared)


def blank_factors(
    weight: nn.Parameter, place: Place, rank: int, dtype: torch.dtype | None
) -> tuple[nn.Parameter, nn.Parameter]:
    """Factors without values: what this rank holds of [rank I] and [O rank], or of stacks."""
    outputs, inputs = place.shape
    shapes = (
        _held((*place.stack, rank, inputs), place.a_specs),
        _held((*place.stack, outputs, rank), place.b_specs),
    )
    a, b = (
        nn.Parameter(torch.empty(shape, dtype=dtype or weight.dtype, device=weight.device))
        for shape in shapes
    )
    return a, b


def _held(shape: tuple[int, ...], specs: Sequence[ShardSpec]) -> list[int]:
    """The shape of this rank's share."""
    held = list(shape)
    for spec in specs:
        held[spec.dim] = spec.held_length(held[spec.dim])
    return held


def share_of(whole: nn.Parameter, specs: tuple[ShardSpec, ...]) -> nn.Parameter:
    """This rank's share of a whole factor: the same parameter if it is not cut."""
    if all(spec.group.size == 1 for spec in specs):
        return whole
    share = torch.empty(_held(tuple(whole.shape), specs), dtype=whole.dtype, device=whole.device)
    if not whole.is_meta:
        load_slices(share, specs, whole)
    return nn.Parameter(share, requires_grad=whole.requires_grad)


def whole_of(factor: LoraFactor) -> nn.Parameter:
    """A whole factor: the same parameter if it is not cut."""
    specs = specs_of(factor, "weight")
    if all(spec.group.size == 1 for spec in specs):
        return factor.weight
    whole = whole_tensor(factor.weight, specs)
    return nn.Parameter(whole, requires_grad=factor.weight.requires_grad)


def attach(
    layer: nn.Module,
    place: Place,
    factors: tuple[nn.Parameter, nn.Parameter],
    alpha: float,
    rslora: bool,
) -> None:
    """Put an adapter on a layer, from this rank's shares of the factors."""
    first, second = _leaves(place.embeds)
    a = LoraFactor(factors[0], place.a_specs, start="zero" if place.embeds else "uniform")
    b = LoraFactor(factors[1], place.b_specs, start="normal" if place.embeds else "zero")
    layer.add_module(first, a.train(layer.training))
    layer.add_module(second, b.train(layer.training))
    adapter = Adapter(a, b, alpha, rslora, place.embeds, place.group, place.summed, place.shared)
    layer.__dict__["adapter"] = adapter
    if type(layer) in (nn.Linear, nn.Embedding):
        # First, because another hook may gather the features that it adds to.
        layer.register_forward_hook(Add(adapter), prepend=True, with_kwargs=True)


def detach(layer: nn.Module) -> None:
    """Take a layer's adapter off."""
    for leaf, _ in factors_of(layer):
        delattr(layer, leaf)
    if type(layer) in (nn.Linear, nn.Embedding):
        take_off_hooks(layer, Add)
        del layer.__dict__["adapter"]
    else:
        layer.__dict__["adapter"] = None


def factors_of(layer: nn.Module) -> list[tuple[str, LoraFactor]]:
    """The factors of an adapted layer, by their names there."""
    return [(name, part) for name, part in layer.named_children() if isinstance(part, LoraFactor)]


def _leaves(embeds: bool) -> tuple[str, str]:
    return ("lora_embedding_A", "lora_embedding_B") if embeds else ("lora_A", "lora_B")


def share_messages(module: nn.Module) -> None:
    """Let the adapters of each parent sum their gradients in one message."""
    parts = dict(module.named_modules())
    for part in parts.values():
        take_off_hooks(part, Lend, TakeBack)
    lenders: dict[tuple[str, Group], list[Adapter]] = {}
    for name, _, adapter in adapted_layers(module):
        if any(adapter.summed) and name:
            parent = name.rpartition(".")[0]
            lenders.setdefault((parent, adapter.group), []).append(adapter)
    for (parent, _), adapters in lenders.items():
        if len(adapters) > 1:
            parts[parent].register_forward_pre_hook(Lend(tuple(adapters)))
            parts[parent].register_forward_hook(TakeBack(tuple(adapters)), always_call=True)


def clean_module_name(name: str) -> str:
    """A module's name without the steps of wrappers."""
    return clean_name(f"{name}.")[:-1]


def modules_by_name(module: nn.Module) -> dict[str, nn.Module]:
    """All modules of a model by their names without the steps of wrappers."""
    return {clean_module_name(name): part for name, part in module.named_modules()}


def kind_of(part: nn.Module) -> str:
    """The class of a module, with its package if that is not torch."""
    kind = type(part)
    return (
        kind.__name__
        if kind.__module__.startswith("torch.")
        else f"{kind.__module__}.{kind.__qualname__}"
    )
