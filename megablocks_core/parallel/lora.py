"""Put low-rank adapters into any model, cut or not, and merge them into its weights.

LoRA, https://arxiv.org/abs/2106.09685, section 4; the scale by the root of the rank is from
https://arxiv.org/abs/2312.03732. What an adapter computes and sends is in ``adapters``.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

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
from megablocks_core.parallel.adapters import (
    Adapter,
    Add,
    Lend,
    LoraFactor,
    TakeBack,
    adapted_layers,
    adapter_of,
)
from megablocks_core.parallel.boundaries import take_off_hooks
from megablocks_core.parallel.embedding import VocabParallelEmbedding
from megablocks_core.parallel.initial import draw_key
from megablocks_core.parallel.linear import ColumnParallelLinear, RowParallelLinear

_LINEAR = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
_EMBEDDING = (nn.Embedding, VocabParallelEmbedding)


def add_lora(
    module: nn.Module,
    patterns: str | Sequence[str],
    *,
    rank: int,
    alpha: float,
    rslora: bool = False,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[str, ...]:
    """Put an adapter beside the weight of each layer that ``patterns`` name, in place.

    The layer then computes ``y = W x + scale * B A x`` with ``scale = alpha / rank``. Every
    other parameter of ``module`` is frozen and keeps its name; the adapter's are
    ``lora_A.weight`` [rank I] and ``lora_B.weight`` [O rank] below the layer. A starts as a
    linear layer's weight does and B with zeros, so that at first nothing changes; for an
    embedding (``lora_embedding_A`` and ``_B``) A starts with zeros and B normal. Outputs,
    gradients and initial values are those of one process, before and after
    ``tensor_parallelize``.

    Forward sends nothing more, but for column-parallel layers under sequence parallelism: an
    all-gather of ``A x``. Backward sends one all-reduce for the factors that are whole, for all
    layers of one parent together, and under sequence parallelism the reduce-scatter of that
    gather; ``docs/traffic.md`` has the formulas.

    Args:
        module: Any model, or a part of one.
        patterns: Names of layers. A pattern matches a whole name or its last steps; a ``*``
            stands for a part of one step: "q_proj", "layers.*.mlp.*_proj".
        rank: The inner size of the product.
        alpha: Numerator of the scale.
        rslora: ``scale = alpha / sqrt(rank)``.
        seed: Of the initial values, which depend on it, on the layer's name and on the place in
            the whole factor alone; default a draw from torch's default generator.
        dtype: Of the adapters; default that of each layer's weight.

    Returns:
        The names of the adapted layers.

    Raises:
        ValueError: ``rank`` is below 1 or above a layer's sizes, ``alpha`` is not above 0, a
            pattern matches nothing or matches a module that is not served, a layer has an
            adapter already, or ``module`` is wrapped by a data-parallel wrapper that would not
            know of new parameters. Nothing was changed.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha={alpha} must be above 0")
    _refuse_wrappers(module)
    layers = _matched(module, [patterns] if isinstance(patterns, str) else list(patterns))
    places = {name: _place(name, layer) for name, layer in layers.items()}
    for name, place in places.items():
        if adapter_of(layers[name]) is not None:
            raise ValueError(f"{name} has an adapter already: remove_lora takes it off")
        if not 1 <= rank <= min(place.shape):
            raise ValueError(
                f"rank={rank} must lie between 1 and {min(place.shape)}, the smaller size of {name}"
            )
    _freeze_base(module)
    if seed is None and not all(layer.weight.is_meta for layer in layers.values()):
        seed = draw_key()
    for name, layer in layers.items():
        _attach(layer, places[name], _blank(layer, places[name], rank, dtype), alpha, rslora)
        for leaf, factor in _factors(layer):
            factor.reset_parameters(seed, f"{_clean(name)}.{leaf}.")
    _share_messages(module)
    return tuple(_clean(name) for name in layers)


def remove_lora(module: nn.Module) -> None:
    """Take all adapters off, in place; merged weights stay as they are. All stays frozen."""
    for _, layer, _ in list(adapted_layers(module)):
        _detach(layer)
    _share_messages(module)


@torch.no_grad()
def merge_lora(module: nn.Module) -> None:
    """Add ``scale * B A`` to each adapted weight, in place; the adapters then rest.

    A rank merges its own shares and sends nothing. The sum is taken in at least float32 and
    rounded once. The weights as they were are kept, a copy of each, for ``unmerge_lora``;
    ``remove_lora`` lets them go.

    Raises:
        ValueError: An adapted weight is tied to another layer's, which would change too.
    """
    found = [(name, layer, x) for name, layer, x in adapted_layers(module) if not x.merged]
    for name, layer, _ in found:
        twin = _twin(module, layer)
        if twin is not None:
            raise ValueError(f"{name}.weight must not be merged: it is tied to that of {twin}")
    for _, layer, adapter in found:
        base = layer.weight.detach().clone()
        layer.weight.copy_(_merged(base, adapter))
        adapter.base = base


@torch.no_grad()
def unmerge_lora(module: nn.Module) -> None:
    """Undo ``merge_lora``: the weights have the bits again that they had before.

    Raises:
        ValueError: A weight or an adapter has changed since; nothing was.
    """
    found = [(name, layer, adapter) for name, layer, adapter in adapted_layers(module)]
    for name, layer, adapter in found:
        if adapter.base is not None and not torch.equal(
            layer.weight, _merged(adapter.base, adapter)
        ):
            raise ValueError(f"{name} has changed since merge_lora and cannot be unmerged")
    for _, layer, adapter in found:
        if adapter.base is not None:
            layer.weight.copy_(adapter.base)
            adapter.base = None


def reset_lora(module: nn.Module, *, seed: int) -> None:
    """Give every adapter its initial values in the model of ``seed``."""
    for name, layer, _ in adapted_layers(module):
        for leaf, factor in _factors(layer):
            factor.reset_parameters(seed, f"{_clean(name)}.{leaf}.")


class Spared(NamedTuple):
    """An adapter off its layer: whole factors and what else it is made from."""

    name: str
    a: nn.Parameter
    b: nn.Parameter
    adapter: Adapter


def spare_adapters(module: nn.Module, *, cut: bool) -> list[Spared]:
    """Take adapters off before ``module`` is cut, or made whole again.

    Args:
        module: The model.
        cut: Take those of cut layers too, which gathers their factors; else only those of
            torch's own layers that are whole.

    Raises:
        ValueError: An adapter is merged; nothing was changed.
    """
    found = [
        (name, layer, adapter)
        for name, layer, adapter in adapted_layers(module)
        if cut or (type(layer) in (nn.Linear, nn.Embedding) and not specs_of(layer, "weight"))
    ]
    for name, _, adapter in found:
        if adapter.merged:
            raise ValueError(
                f"{name} is merged with its adapter: unmerge_lora or remove_lora first"
            )
    spared = []
    for name, layer, adapter in found:
        a, b = (_whole(factor) for factor in (adapter.a, adapter.b))
        spared.append(Spared(name, a, b, adapter))
        _detach(layer)
    if found:
        _share_messages(module)
    return spared


def restore_adapters(module: nn.Module, spared: Iterable[Spared]) -> None:
    """Put adapters on the layers of the same names, cut as these are; sends nothing."""
    for name, a, b, adapter in spared:
        layer = module.get_submodule(name)
        place = _place(name, layer)
        factors = (_share(a, place.a_specs), _share(b, place.b_specs))
        _attach(layer, place, factors, adapter.alpha, adapter.rslora)
    if spared:
        _share_messages(module)


def adapted_parameters(module: nn.Module) -> tuple[set[str], set[str]]:
    """Names of adapters' parameters that are cut, and of those whose gradients are summed."""
    cut, summed = set(), set()
    for name, layer, adapter in adapted_layers(module):
        for (leaf, factor), is_summed in zip(_factors(layer), adapter.summed, strict=True):
            if is_summed:
                summed.add(f"{name}.{leaf}.weight".lstrip("."))
            elif any(spec.group.size > 1 for spec in specs_of(factor, "weight")):
                cut.add(f"{name}.{leaf}.weight".lstrip("."))
    return cut, summed


def refuse_peft(module: nn.Module) -> None:
    """Raise for a layer that peft has wrapped: the plan's names would pass it by."""
    for name, part in module.named_modules():
        if isinstance(getattr(part, "base_layer", None), nn.Module):
            raise ValueError(
                f"{name} is wrapped by a {_kind(part)}, which cannot be cut: hand in the model "
                "without peft, and add its adapters with load_lora or add_lora"
            )


class _Place(NamedTuple):
    """How the adapter of one layer is cut.

    Attributes:
        shape: The layer's (O, I).
        a_specs: The cuts of A.
        b_specs: The cuts of B.
        group: The ranks.
        summed: Whether the gradients of A and B are parts of a sum over them.
        shared: The cut of B, if neighbours hold the same slices.
        embeds: The layer takes ids.
    """

    shape: tuple[int, int]
    a_specs: tuple[ShardSpec, ...] = ()
    b_specs: tuple[ShardSpec, ...] = ()
    group: Group = LOCAL
    summed: tuple[bool, bool] = (False, False)
    shared: ShardSpec | None = None
    embeds: bool = False


def _place(name: str, layer: nn.Module) -> _Place:
    """Decide it.

    Raises:
        ValueError: The layer is not served.
    """
    if type(layer) not in (*_LINEAR, *_EMBEDDING):
        served = ", ".join(kind.__name__ for kind in (*_LINEAR, *_EMBEDDING))
        raise ValueError(f"{name} is a {_kind(layer)}; adapters are served on {served}")
    weight, specs = layer.get_parameter("weight"), specs_of(layer, "weight")
    embeds = isinstance(layer, _EMBEDDING)
    if hasattr(weight, "full_tensor"):
        raise ValueError(f"{name}.weight is sharded: add adapters before fully_shard")
    whole = logical_shape(weight, specs)
    shape = (whole[1], whole[0]) if embeds else (whole[0], whole[1])
    if not specs:
        # A whole layer may see this rank's heads or tokens alone.
        group: Group = getattr(layer, "summed_over", LOCAL)
        used_on_part = group.size > 1
        return _Place(shape, group=group, summed=(used_on_part, used_on_part), embeds=embeds)
    spec, several = specs[0], specs[0].group.size > 1
    if len(specs) > 1 or (type(layer) is nn.Linear and spec.dim != 0):
        raise ValueError(f"{name}.weight is cut by {tuple(specs)}, which adapters do not serve")
    if embeds:
        columns = (replace(spec, dim=1),)
        return _Place(shape, columns, (), spec.group, (False, several), embeds=True)
    if spec.dim == 1:
        return _Place(shape, (spec,), (), spec.group, (False, several))
    shared = spec if spec.has_copies else None
    return _Place(shape, (), (spec,), spec.group, (several, False), shared)


def _blank(
    layer: nn.Module, place: _Place, rank: int, dtype: torch.dtype | None
) -> tuple[nn.Parameter, nn.Parameter]:
    """Factors without values: what this rank holds of [rank I] and [O rank]."""
    weight = layer.get_parameter("weight")
    outputs, inputs = place.shape
    blanks = (
        torch.empty(_held((rank, inputs), place.a_specs), dtype=dtype or weight.dtype),
        torch.empty(_held((outputs, rank), place.b_specs), dtype=dtype or weight.dtype),
    )
    a, b = (nn.Parameter(torch.empty_like(blank, device=weight.device)) for blank in blanks)
    return a, b


def _held(shape: tuple[int, ...], specs: Sequence[ShardSpec]) -> list[int]:
    """The shape of this rank's share."""
    held = list(shape)
    for spec in specs:
        held[spec.dim] = sum(part.stop - part.start for part in spec.ranges(held[spec.dim]))
    return held


def _share(whole: nn.Parameter, specs: tuple[ShardSpec, ...]) -> nn.Parameter:
    """This rank's share of a whole factor: the same parameter if it is not cut."""
    if all(spec.group.size == 1 for spec in specs):
        return whole
    share = torch.empty(_held(tuple(whole.shape), specs), dtype=whole.dtype, device=whole.device)
    if not whole.is_meta:
        load_slices(share, specs, whole)
    return nn.Parameter(share, requires_grad=whole.requires_grad)


def _whole(factor: LoraFactor) -> nn.Parameter:
    """A whole factor: the same parameter if it is not cut."""
    specs = specs_of(factor, "weight")
    if all(spec.group.size == 1 for spec in specs):
        return factor.weight
    whole = whole_tensor(factor.weight, specs)
    return nn.Parameter(whole, requires_grad=factor.weight.requires_grad)


def _attach(
    layer: nn.Module,
    place: _Place,
    factors: tuple[nn.Parameter, nn.Parameter],
    alpha: float,
    rslora: bool,
) -> None:
    first, second = _leaves(place.embeds)
    a = LoraFactor(factors[0], place.a_specs, start="zero" if place.embeds else "uniform")
    b = LoraFactor(factors[1], place.b_specs, start="normal" if place.embeds else "zero")
    layer.add_module(first, a.train(layer.training))
    layer.add_module(second, b.train(layer.training))
    adapter = Adapter(a, b, alpha, rslora, place.embeds, place.group, place.summed, place.shared)
    layer.__dict__["adapter"] = adapter
    if type(layer) in (nn.Linear, nn.Embedding):
        layer.register_forward_hook(Add(adapter), with_kwargs=True)


def _detach(layer: nn.Module) -> None:
    for leaf, _ in _factors(layer):
        delattr(layer, leaf)
    if type(layer) in (nn.Linear, nn.Embedding):
        take_off_hooks(layer, Add)
        del layer.__dict__["adapter"]
    else:
        layer.__dict__["adapter"] = None


def _factors(layer: nn.Module) -> list[tuple[str, LoraFactor]]:
    """The factors of an adapted layer, by their names there."""
    return [(name, part) for name, part in layer.named_children() if isinstance(part, LoraFactor)]


def _leaves(embeds: bool) -> tuple[str, str]:
    return ("lora_embedding_A", "lora_embedding_B") if embeds else ("lora_A", "lora_B")


def _share_messages(module: nn.Module) -> None:
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


def _freeze_base(module: nn.Module) -> None:
    """Freeze all that is not an adapter's."""
    kept = {
        id(factor.weight)
        for _, _, adapter in adapted_layers(module)
        for factor in (adapter.a, adapter.b)
    }
    for parameter in module.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(False)


def _matched(module: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    """The layers that patterns name, in the order of the module."""
    names = [(name, part) for name, part in module.named_modules() if name]
    found: set[str] = set()
    unmatched = []
    for pattern in patterns:
        match = re.compile(r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"[^.]*")).fullmatch
        matched = [name for name, _ in names if match(_clean(name))]
        found.update(matched)
        if not matched:
            unmatched.append(pattern)
    if unmatched or not patterns:
        raise ValueError(f"patterns must name layers of {_kind(module)}, not {unmatched}")
    return {name: part for name, part in names if name in found}


def _refuse_wrappers(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "add adapters before DistributedDataParallel: it would not reduce their gradients"
            )


def _twin(module: nn.Module, layer: nn.Module) -> str | None:
    """The name of another module that holds the same weight."""
    for name, part in module.named_modules():
        if part is not layer and any(x is layer.weight for x in part._parameters.values()):
            return name or _kind(module)
    return None


def _merged(base: Tensor, adapter: Adapter) -> Tensor:
    added = adapter.added_weight()
    return (base.to(torch.promote_types(base.dtype, added.dtype)) + added).to(base.dtype)


def _clean(name: str) -> str:
    """A module's name without the steps of wrappers."""
    return clean_name(f"{name}.")[:-1]


def _kind(part: nn.Module) -> str:
    kind = type(part)
    return (
        kind.__name__
        if kind.__module__.startswith("torch.")
        else f"{kind.__module__}.{kind.__qualname__}"
    )
