"""Run a model over data, at any layout, and note what its weights are multiplied with."""

from __future__ import annotations

import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.export.arguments import check_model
from megablocks_core.export.described import config_of
from megablocks_core.export.layout import Layout
from megablocks_core.export.quantising.calibration import Calibration
from megablocks_core.export.quantising.recipe import Recipe
from megablocks_core.export.quantising.watching import Kind, watched
from megablocks_core.export.verifying import layout_of
from megablocks_core.export.vocabulary import part_shapes
from megablocks_core.groups import LOCAL, Group, interrupts_held, together

Batch = Tensor | Mapping[str, Any]
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_NAMED = 8  # in a warning


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    recipe: Recipe,
    group: Group = LOCAL,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """The largest magnitudes of what the weights that ``recipe`` takes are multiplied with.

    Every rank runs ``model`` over its batches, without gradients and in evaluation mode; data-
    parallel ranks have different ones, others the same. Hooks look at the inputs of modules that
    own weights, and if the recipe quantises a cache, at keys, after norms and positions, and at
    values. Beside what the model sends, ranks tell each other before each batch that they go on; at
    the end they exchange what they found, and all get the same.

    An expert that saw no token, or zeros alone, has for that weight the largest magnitude that the
    same weight of another expert of its layer saw; a warning names it. Other weights that saw zeros
    alone have 0, of which no scale can be made.

    Args:
        model: A ``Decoder``, or another module of a family in ``families.FAMILIES``.
        batches: What the model is called with: a tensor, or a mapping of its arguments. All ranks
            must have as many, for a model may communicate.
        recipe: Which weights are asked for, and if a cache is.
        group: All ranks that hold a part of the model, or run it over other data.
        progress: Called with the number of batches done, and of all (0 if that is not known).

    Raises:
        ValueError: ``model`` has no values, there is no batch, or one is empty or of another kind,
            ranks have different numbers of them, ``recipe`` takes no weight of the model, a weight
            was never used, or a magnitude is not finite; by name.
        RuntimeError: Another rank failed.
    """
    task = "calibrate()"
    with interrupts_held(group=group):
        with together(task, group=group):
            check_model(model)
            _check_values(model)
            places = _places(model, recipe)
        found = _Largest(places)
        wanted, cache = set(places.wanted), recipe.cache_algorithm is not None
        with watched(model, wanted, found, cache=cache):
            _run(model, batches, group=group, task=task, progress=progress)
        with together(task, group=group):
            own = found.numbers()
        return _merged(group.all_gather_object(own), places, cache=cache)


class _Places:
    """Where what is heard of logical tensors goes, by on-disk names.

    Attributes:
        names: Of every weight, by logical name: one on-disk name, or those of experts in order,
            time after time.
        wanted: The logical names of weights that are taken.
        taken: Their on-disk names.
    """

    def __init__(self, layout: Layout, recipe: Recipe) -> None:
        self.names: dict[str, list[str]] = {}
        self.wanted: list[str] = []
        self.taken: list[str] = []
        for rule in layout.rules:
            theirs = list(rule.theirs)
            for name in rule.ours:
                self.names[name] = theirs
            if any(recipe.takes(name) for name in theirs):
                self.wanted += rule.ours
                self.taken += [name for name in theirs if recipe.takes(name)]


def _places(model: nn.Module, recipe: object) -> _Places:
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe={reprlib.repr(recipe)} must be a recipe, such as Fp8()")
    places = _Places(layout_of(config_of(model)).named(part_shapes(model)), recipe)
    if not places.taken:
        raise ValueError(f"recipe={recipe} must take a weight of the model, but takes none")
    return places


class _Largest:
    """The largest that was heard so far, on the device of what is heard.

    Args:
        places: Where it goes.
    """

    def __init__(self, places: _Places) -> None:
        self._places = places
        self._found: dict[tuple[Kind, str], Tensor] = {}

    def __call__(self, kind: Kind, name: str, amax: Tensor) -> None:
        before = self._found.get((kind, name))
        self._found[kind, name] = amax if before is None else torch.maximum(before, amax)

    def numbers(self) -> dict[Kind, dict[str, float]]:
        """By on-disk name.

        Raises:
            ValueError: A magnitude is NaN or infinite.
        """
        numbers: dict[Kind, dict[str, float]] = {"inputs": {}, "keys": {}, "values": {}}
        for (kind, name), amax in self._found.items():
            theirs, own = self._places.names[name], amax.reshape(-1).tolist()
            for index, place in enumerate(theirs):
                value = own[index % len(own)]
                if not isfinite(value) and value != -inf:
                    raise ValueError(f"{kind} of {place} must be finite, but reach {value}")
                numbers[kind][place] = max(numbers[kind].get(place, -inf), value)
        return numbers


def _run(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    group: Group,
    task: str,
    progress: Callable[[int, int], None] | None,
) -> None:
    total = len(batches) if isinstance(batches, Sized) else 0
    waiting: Iterator[Batch] | None = None
    done, fault = 0, None
    while True:
        batch: Batch | None = None
        with together(task, group=group):
            if fault is not None:
                raise fault
            waiting = iter(batches) if waiting is None else waiting
            batch = next(waiting, None)
            _check_batch(batch, done)
        others = group.all_gather_object(batch is None)
        if any(others) != all(others):
            ended = [rank for rank, end in zip(group.ranks, others, strict=True) if end]
            raise ValueError(
                f"batches must be as many on all ranks, but ranks {ended} have {done}, others more"
            )
        if batch is None:
            return
        try:
            model(**batch) if isinstance(batch, Mapping) else model(batch)
        except Exception as error:
            fault = error
        done += 1
        if progress is not None and fault is None:
            progress(done, total)


def _check_values(model: nn.Module) -> None:
    if empty := [name for name, value in model.named_parameters() if value.is_meta]:
        raise ValueError(f"model must have values, but {empty} are on meta")


def _check_batch(batch: object, done: int) -> None:
    if batch is None and not done:
        raise ValueError("batches must hold at least one batch")
    words = isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch)
    if not (batch is None or words or isinstance(batch, Tensor)):
        raise ValueError(
            f"batches[{done}]={reprlib.repr(batch)} must be a tensor, or arguments by name"
        )
    if isinstance(batch, Tensor) and not batch.numel():
        raise ValueError(
            f"batches[{done}] of shape {tuple(batch.shape)} must hold at least one token"
        )


def _merged(
    ranks: list[dict[Kind, dict[str, float]]], places: _Places, *, cache: bool
) -> Calibration:
    """The largest of all ranks, in the order of files; every rank comes to the same.

    Raises:
        ValueError: A weight was not used.
    """
    found: dict[Kind, dict[str, float]] = {"inputs": {}, "keys": {}, "values": {}}
    for own in ranks:
        for kind, numbers in own.items():
            for name, value in numbers.items():
                found[kind][name] = max(found[kind].get(name, -inf), value)
    inputs = {name: found["inputs"].get(name, -inf) for name in places.taken}
    others = _of_other_experts(inputs)
    inputs |= others
    if unused := [name for name, value in inputs.items() if value == -inf]:
        raise ValueError(f"batches must use every weight, but nothing was multiplied with {unused}")
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        warnings.warn(
            f"no token, or zeros alone, came to {', '.join([*others][:_NAMED])}{more}: other "
            "experts of the layer stand in",
            stacklevel=3,
        )
    order = {name: place for place, name in enumerate(sum(places.names.values(), []))}
    keys, values = (
        dict(sorted(found[kind].items(), key=lambda item: order[item[0]])) if cache else {}
        for kind in ("keys", "values")
    )
    return Calibration(inputs, keys, values)


def _of_other_experts(inputs: Mapping[str, float]) -> dict[str, float]:
    """For experts' weights that nothing was multiplied with, or zeros, what others saw at most."""
    largest: dict[str, float] = {}
    idle: dict[str, str] = {}
    for name, value in inputs.items():
        if _EXPERT.search(name):
            layer = _EXPERT.sub("experts.", name)
            largest[layer] = max(largest.get(layer, -inf), value)
            if value <= 0:
                idle[name] = layer
    return {name: largest[layer] for name, layer in idle.items() if largest[layer] > 0}
