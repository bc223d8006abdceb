"""Hooks that look at what a model's weights are multiplied with, and at what it would cache.

What a hook hears is a logical name and a tensor. Nothing is changed, and nothing sent. Modules are
known by what they have, for models may be ours or of transformers.

Dimensions: T tokens, k experts of a token, E experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megablocks_core.groups import logical_tensors, specs_of
from megablocks_core.groups.stacks import unstacked
from megablocks_core.numbers.scaling import amax_of

Kind = Literal["inputs", "keys", "values"]
# Modules that make cached keys, and values; of GPT-2 one module makes both.
_MAKERS = {"keys": ("k_proj", "c_attn"), "values": ("v_proj", "c_attn")}
_STACKS = ("gate_up_proj", "up_proj", "down_proj")


class Heard(Protocol):
    """What is called with a kind, a logical name, and largest magnitudes: one, or one an expert."""

    def __call__(self, kind: Kind, name: str, amax: Tensor) -> None: ...  # noqa: D102


@contextmanager
def watched(model: nn.Module, wanted: set[str], heard: Heard, *, cache: bool) -> Iterator[None]:
    """Inside, calls of ``model`` are heard; it is in evaluation mode, and as before afterwards.

    Args:
        model: The model.
        wanted: Logical names of weights whose inputs are looked at.
        heard: Called for each of them, and for cached keys and values by the logical name of the
            weight that makes them.
        cache: Whether to look at cached keys and values.
    """
    modes = {module: module.training for module in model.modules()}
    names = {id(tensor): name for name, tensor, _ in logical_tensors(model, remove_duplicate=True)}
    handles: list[RemovableHandle] = []
    try:
        for module in model.modules():
            handles += _inputs(module, names, wanted, heard)
            if cache:
                handles += _cache(module, names, heard)
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode


def _inputs(
    module: nn.Module, names: Mapping[int, str], wanted: set[str], heard: Heard
) -> list[RemovableHandle]:
    """Hooks of the module that owns a weight, or stacks of experts' weights."""
    if hasattr(module, "input_amaxes"):
        return [module.register_forward_pre_hook(_of_ours(module, names, wanted, heard))]
    weight = module._parameters.get("weight")
    name = names.get(id(weight))
    if weight is not None and name in wanted:

        def linear(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
                heard("inputs", name, amax_of(inputs[0]))

        return [module.register_forward_pre_hook(linear)]
    stacks = {stack: names.get(id(module._parameters.get(stack))) for stack in _STACKS}
    found = {stack: own for stack, own in stacks.items() if own in wanted and own is not None}
    if found and _is_served(module):
        return [module.register_forward_pre_hook(_of_transformers(found, heard))]
    return []


def _of_ours(
    module: Any, names: Mapping[int, str], wanted: set[str], heard: Heard
) -> Callable[..., None]:
    """Our experts, which say themselves what they multiply."""
    parts = {
        stack: [own for own, _, _ in unstacked(names[id(tensor)], tensor, specs_of(module, stack))]
        for stack, tensor in module._parameters.items()
        if tensor is not None and id(tensor) in names
    }

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        for stack, amax_e in module.input_amaxes(*inputs).items():
            for name, amax in zip(parts[stack], amax_e, strict=True):
                if name in wanted:
                    heard("inputs", name, amax)

    return hook


def _is_served(module: Any) -> bool:
    """Whether stacked experts of transformers are of the form that the hook below knows."""
    plain = not getattr(module, "is_transposed", False) and not getattr(module, "has_bias", False)
    return plain and hasattr(module, "act_fn")


def _of_transformers(stacks: Mapping[str, str], heard: Heard) -> Callable[..., None]:
    """Stacked experts of transformers, called with tokens, their experts and the weights of these.

    Tokens [T H], experts [T k].
    """

    def hook(module: Any, inputs: tuple[Any, ...]) -> None:
        x_TH, chosen_Tk = inputs[0], inputs[1]
        first, last = module.up_proj if _has_no_gate(module) else module.gate_up_proj, "down_proj"
        count = first.shape[0]
        before = torch.full((count,), -inf, device=x_TH.device)
        after = before.clone()
        for expert in chosen_Tk.unique().tolist():
            if expert < count:  # transformers marks tokens of other ranks with one behind the last
                own_nH = x_TH[(chosen_Tk == expert).any(-1)]
                hidden = nn.functional.linear(own_nH, first[expert])
                hidden = _activated(module, hidden)
                before[expert], after[expert] = amax_of(own_nH), amax_of(hidden)
        for stack, name in stacks.items():
            heard("inputs", name, after if stack == last else before)

    return hook


def _has_no_gate(module: nn.Module) -> bool:
    return "gate_up_proj" not in module._parameters


def _activated(module: Any, hidden: Tensor) -> Tensor:
    if _has_no_gate(module):
        return module.act_fn(hidden)
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(hidden)
    gate, up = hidden.chunk(2, dim=-1)
    return module.act_fn(gate) * up


def _cache(module: nn.Module, names: Mapping[int, str], heard: Heard) -> list[RemovableHandle]:
    """Hooks of an attention layer: ours, or one of transformers that takes a cache."""
    makers: dict[Kind, str] = {}
    for kind, parts in _MAKERS.items():
        for part in parts:
            weight = getattr(getattr(module, part, None), "weight", None)
            if id(weight) in names and weight is not None:
                makers[kind] = names[id(weight)]  # pyright: ignore[reportArgumentType]
    if makers.keys() != _MAKERS.keys():
        return []

    def cached(keys: Tensor, values: Tensor) -> None:
        heard("keys", makers["keys"], amax_of(keys))
        heard("values", makers["values"], amax_of(values))

    place = getattr(module, "cached_heads", None)
    if isinstance(place, nn.Module):
        return [place.register_forward_pre_hook(lambda _, heads: cached(*heads))]
    accepted = inspect.signature(module.forward).parameters
    argument = next((one for one in ("cache", "past_key_values") if one in accepted), None)
    if argument is None:
        return []

    def hook(
        _: nn.Module, inputs: tuple[Any, ...], words: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs, {**words, argument: _Listening(words.get(argument), cached)}

    return [module.register_forward_pre_hook(hook, with_kwargs=True)]


class _Listening:
    """A cache of transformers, or none, of which one hears what is added."""

    def __init__(self, cache: Any, heard: Callable[[Tensor, Tensor], None]) -> None:
        self._cache, self._heard = cache, heard

    def update(self, keys: Tensor, values: Tensor, *others: Any, **words: Any) -> Sequence[Tensor]:
        """Hear keys and values; then what the cache does."""
        self._heard(keys, values)
        if self._cache is None:
            return keys, values
        return self._cache.update(keys, values, *others, **words)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
