"""Put low-rank adapters into any model, cut or not, and merge them into its weights.

LoRA, https://arxiv.org/abs/2106.09685, section 4; the scale by the root of the rank is from
https://arxiv.org/abs/2312.03732. What an adapter computes and sends is in ``adapters``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from megablocks_core.groups import specs_of
from megablocks_core.groups.patterns import chosen
from megablocks_core.parallel.initial import draw_key
from megablocks_core.parallel.lora.layers import (
    Place,
    attach,
    blank_factors,
    clean_module_name,
    detach,
    factors_of,
    kind_of,
    place_of,
    share_messages,
    share_of,
    whole_of,
)
from megablocks_core.parallel.lora.sites import adapted_sites, sites_of, stacks_of
from megablocks_core.parallel.tensor.adapters import Adapter, adapted_layers


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

    The weights of a mixture's experts are matrices of a stack, layers by the names that they have
    in files: "experts.*.up_proj". All of a stack get an adapter, each its own; the factors are
    stacked too.

    Forward sends nothing more, but for column-parallel layers under sequence parallelism: an
    all-gather of ``A x``. Backward sends one all-reduce for the factors that are whole, for all
    layers of one parent together, and under sequence parallelism the reduce-scatter of that
    gather; ``docs/traffic.md`` has the formulas. Experts send one all-reduce over ``etp`` for
    their whole factors.

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
        The names of the adapted layers; of a stack one, with ``*`` for the number.

    Raises:
        ValueError: ``rank`` is no integer, below 1 or above a layer's sizes, ``alpha`` is not
            above 0, the adapters' dtype is none to train in, a pattern matches nothing or
            matches a module that is not served or a part of a stack, a layer has an adapter
            already, or ``module`` is wrapped by a data-parallel wrapper that would not know of
            new parameters. Nothing was changed.
    """
    names = _matched(module, [patterns] if isinstance(patterns, str) else list(patterns))
    settings = dict.fromkeys(names, (rank, alpha))
    adapt(module, settings, rslora=rslora, seed=seed, dtype=dtype)
    return tuple(names)


def adapt(
    module: nn.Module,
    settings: Mapping[str, tuple[int, float]],
    *,
    rslora: bool,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
    present: bool = False,
) -> None:
    """``add_lora`` for layers of given names, each with a (rank, alpha) of its own.

    Args:
        module: Any model.
        settings: By the name of a layer.
        rslora: As for ``add_lora``.
        seed: As for ``add_lora``.
        dtype: As for ``add_lora``.
        present: A layer may have an adapter already, if it is of the same settings.

    Raises:
        ValueError: As ``add_lora``; nothing was changed.
    """
    _refuse_wrappers(module)
    known = sites_of(module)
    sites = {name: known[name] for name in settings}
    places = {name: site.place() for name, site in sites.items()}
    new = []
    for name, (rank, alpha) in settings.items():
        _check(name, places[name], rank, alpha)
        adapter, weight = sites[name].adapter, sites[name].weight
        if adapter is None:
            _check_dtype(name, dtype or weight.dtype)
            if hasattr(weight, "full_tensor"):
                raise ValueError(f"{name}.weight is sharded: add adapters before fully_shard")
            new.append(name)
        elif not present:
            raise ValueError(f"{name} has an adapter already: remove_lora takes it off")
        elif (adapter.rank, adapter.alpha, adapter.rslora) != (rank, alpha, rslora):
            raise ValueError(f"{name} has an adapter of another rank, alpha or rslora")
        elif adapter.merged:
            raise ValueError(f"{name} is merged with its adapter: unmerge_lora first")
    _freeze_base(module)
    if seed is None and not all(sites[name].weight.is_meta for name in new):
        seed = draw_key()
    for name in new:
        site, place, (rank, alpha) = sites[name], places[name], settings[name]
        site.attach(place, blank_factors(site.weight, place, rank, dtype), alpha, rslora)
        for leaf, factor in site.factors():
            factor.reset_parameters(seed, f"{site.path(leaf)}.")
    share_messages(module)


def remove_lora(module: nn.Module) -> None:
    """Take all adapters off, in place; merged weights stay as they are. All stays frozen."""
    for site in adapted_sites(module):
        site.detach()
    share_messages(module)


class Spared(NamedTuple):
    """An adapter off its layer: whole factors and what else it is made from."""

    name: str
    a: nn.Parameter
    b: nn.Parameter
    adapter: Adapter


def spare_adapters(module: nn.Module, *, cut: bool) -> list[Spared]:
    """Take adapters of layers off before ``module`` is cut, or made whole again.

    Those of stacks stay: no plan cuts a stack.

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
        a, b = (whole_of(factor) for factor in (adapter.a, adapter.b))
        spared.append(Spared(name, a, b, adapter))
        detach(layer)
    if found:
        share_messages(module)
    return spared


def restore_adapters(module: nn.Module, spared: Iterable[Spared]) -> None:
    """Put adapters on the layers of the same names, cut as these are; sends nothing."""
    for name, a, b, adapter in spared:
        layer = module.get_submodule(name)
        place = place_of(name, layer)
        factors = (share_of(a, place.a_specs), share_of(b, place.b_specs))
        attach(layer, place, factors, adapter.alpha, adapter.rslora)
    if spared:
        share_messages(module)


def adapted_parameters(module: nn.Module) -> tuple[set[str], set[str]]:
    """Names of adapters' parameters that are cut, and of those whose gradients are summed."""
    cut, summed = set(), set()
    for name, layer, adapter in adapted_layers(module):
        for (leaf, factor), is_summed in zip(factors_of(layer), adapter.summed, strict=True):
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
                f"{name} is wrapped by a {kind_of(part)}, which cannot be cut: hand in the model "
                "without peft, and add its adapters with load_lora or add_lora"
            )


def _freeze_base(module: nn.Module) -> None:
    """Freeze all that is not an adapter's."""
    kept = {id(factor.weight) for site in adapted_sites(module) for _, factor in site.factors()}
    for parameter in module.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(False)


def _matched(module: nn.Module, patterns: list[str]) -> list[str]:
    """The names that patterns match: of layers and of whole stacks, in the order of the module."""
    names = [clean_module_name(name) for name, _ in module.named_modules() if name]
    stacks = {stack.name: stack.layers() for stack in stacks_of(module)}
    found, unmatched = chosen([*names, *chain(*stacks.values())], patterns, ends=True)
    if unmatched or not patterns:
        raise ValueError(f"patterns must name layers of {kind_of(module)}, not {unmatched}")
    matched = set(found)
    for name, layers in stacks.items():
        number = len(matched.intersection(layers))
        if 0 < number < len(layers):
            raise ValueError(
                f"patterns must match all of {name} or none, not {number} of {len(layers)}"
            )
    modules = [name for name in dict.fromkeys(names) if name in matched]
    return modules + [name for name, layers in stacks.items() if layers[0] in matched]


def _check(name: str, place: Place, rank: int, alpha: float) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise ValueError(f"rank={rank!r} must be an integer")
    if not 1 <= rank <= min(place.shape):
        raise ValueError(
            f"rank={rank} must lie between 1 and {min(place.shape)}, the smaller size of {name}"
        )
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha={alpha} must be above 0")


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"dtype={dtype} must be floating and of 16 bits or more, for the adapter of {name}"
        )


def _refuse_wrappers(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "add adapters before DistributedDataParallel: it would not reduce their gradients"
            )
