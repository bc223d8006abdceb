"""A mixture as a file: all that decides which tokens each step of a run has.

JSON, or TOML where the name ends so. Docs: docs/data-preparation.md.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megablocks_core.data.blend_order import greedy
from megablocks_core.data.blended import BlendedDataset
from megablocks_core.data.checks import real, whole_number
from megablocks_core.data.content import split_by_content
from megablocks_core.data.gpt import GPTDataset
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.split import Split, split_documents, split_sequences
from megablocks_core.data.steps import Stages, StepPlan

NEEDED = {"sources", "sequence_length", "global_batch_size", "seed"}
INSIDE = ("cross_document_loss", "cross_document_attention", "restart_positions")
KNOWN = NEEDED | {"steps", "order", "split", "weights", "max_repetition", "end_token", *INSIDE}
KNOWN |= {"row_length", "skip"}
OF_SOURCE = {"prefix", "weight", "seed"}
OF_SPLIT = {"weights", "names", "take", "by", "seed"}


@dataclass(frozen=True)
class Recipe:
    """An opened recipe.

    Attributes:
        path: Of its file.
        dataset: The blend of its sources; ``dataset.sources`` has them by name.
        loader_options: What a ``Loader`` is given beside it: ``global_batch_size``, and
            ``sequence_length`` and ``skip`` where the recipe has them.
        steps: How many there are.
    """

    path: str
    dataset: BlendedDataset
    loader_options: dict[str, Any]
    steps: int


def open_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Open the datasets that a recipe names and mix them as it says. ::

        recipe = open_recipe("recipe.json")
        loader = Loader(recipe.dataset, micro_batch_size=4, **recipe.loader_options)

    A prefix that is no absolute path and no URL begins at the recipe's folder. Source ``i`` (from
    0, in the order of the file) is shuffled by the recipe's ``seed + i`` unless it has its own.

    Raises:
        ValueError: The file is no such recipe: a key is unknown, missing or given twice, or a
            value is not what the dataset it is for takes; names the file.
    """
    place = Path(path)
    given = _read(place)
    try:
        return _opened(place, given)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
        if path.suffix == ".toml":
            return tomllib.loads(text)
        found = json.loads(text, object_pairs_hook=_different_keys)
    except (ValueError, RecursionError) as error:  # decoding and both parsers raise it
        raise ValueError(f"{path}: is no recipe: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must hold an object at its top, as a recipe does")
    return found


def _different_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key is there twice among {[key for key, _ in pairs]}")
    return found


def _opened(path: Path, given: dict[str, Any]) -> Recipe:
    _refuse_keys("the recipe", given, known=KNOWN, needed=NEEDED)
    sources = _table("sources", given["sources"])
    if not sources:
        raise ValueError("sources={} must name at least one")
    for name, source in sources.items():
        _refuse_keys(f"source {name!r}", _table(name, source), known=OF_SOURCE, needed={"prefix"})
    options: dict[str, Any] = {"global_batch_size": _stages(given, "global_batch_size")}
    if "row_length" in given:
        options["sequence_length"] = _stages(given, "row_length")
    if "skip" in given:
        options["skip"] = given["skip"]
    num_samples, weights = None, _weights(given, sources)
    if "steps" in given:
        steps = whole_number("steps", given["steps"], 1)
        if weights is None:
            raise ValueError(f"steps={steps} must be left out where no source has a weight")
        num_samples = StepPlan(options["global_batch_size"]).start(steps)
    dataset = _blend(path, given, sources, weights, num_samples)
    plan = StepPlan(options["global_batch_size"])
    return Recipe(str(path), dataset, options, plan.num_steps(len(dataset), drop_last=True))


def _blend(
    path: Path,
    given: dict[str, Any],
    sources: dict[str, Any],
    weights: Any,
    num_samples: int | None,
) -> BlendedDataset:
    seed, order = whole_number("seed", given["seed"], 0), given.get("order", "native")
    take = _splitter(given.get("split"))
    lengths = _lengths_in_megatron_order(sources, weights, num_samples, order)
    options: dict[str, Any] = {name: _flag(given, name) for name in INSIDE if name in given}
    if "end_token" in given:
        options["end_token"] = given["end_token"]
    opened = {}
    for place, (name, source) in enumerate(sources.items()):
        indexed = IndexedDataset(_prefix(path, source["prefix"]))
        opened[name] = GPTDataset(
            indexed,
            given["sequence_length"],
            seed=source.get("seed", seed + place),
            order=order,
            split=take(indexed),
            num_samples=lengths[place],
            **options,
        )
    repetition = {"max_repetition": given["max_repetition"]} if "max_repetition" in given else {}
    return BlendedDataset(
        opened, seed=seed, weights=weights, num_samples=num_samples, order=order, **repetition
    )


def _weights(given: dict[str, Any], sources: dict[str, Any]) -> Any:
    """The weights of a blend: by source, in segments, or none."""
    of_sources = {name: one["weight"] for name, one in sources.items() if "weight" in one}
    if "weights" in given:
        if of_sources:
            raise ValueError("weights and the weight of a source must not be given together")
        return given["weights"]
    if of_sources and len(of_sources) < len(sources):
        missing = [name for name in sources if name not in of_sources]
        raise ValueError(f"sources {missing} must have a weight too, or none may")
    return of_sources or None


def _lengths_in_megatron_order(
    sources: dict[str, Any], weights: Any, num_samples: int | None, order: Any
) -> list[int | None]:
    """Samples that each source is built with: that order is another for another number."""
    if order != "megatron" or num_samples is None or not isinstance(weights, Mapping):
        return [None] * len(sources)
    values = np.array([real(f"weights: {name}", weights.get(name, 0)) for name in sources], float)
    if not 0 < values.sum() < np.inf:
        raise ValueError(f"weights={weights} must have one above 0 and a finite sum")
    drawn = greedy(values / values.sum(), num_samples).source
    return [max(1, count) for count in np.bincount(drawn, minlength=len(sources)).tolist()]


def _splitter(given: Any) -> Callable[[IndexedDataset], Split | None]:
    """What takes of each dataset the documents of one split."""
    if given is None:
        return lambda indexed: None
    split = _table("split", given)
    _refuse_keys("split", split, known=OF_SPLIT, needed={"weights", "take"})
    by, take = split.get("by", "documents"), split["take"]
    names = split.get("names", ["train", "valid", "test"])
    if not isinstance(names, Sequence) or take not in names:
        raise ValueError(f"split: take={take!r} must be one of names={names}")
    if by not in ("documents", "sequences", "content"):
        raise ValueError(f"split: by={by!r} must be 'documents', 'sequences' or 'content'")
    if "seed" in split and by != "content":
        raise ValueError(f"split: seed={split['seed']} must go with by='content'")
    weights = split["weights"]

    def documents_of(indexed: IndexedDataset) -> Split:
        if by == "content":
            found = split_by_content(indexed, weights, names=names, seed=split.get("seed", 0))
        elif by == "sequences":
            found = split_sequences(len(indexed), weights, names=names)
        else:
            found = split_documents(indexed.num_documents, weights, names=names)
        return found[take]

    return documents_of


def _prefix(path: Path, prefix: Any) -> str:
    if not isinstance(prefix, str):
        raise ValueError(f"prefix={prefix!r} must be a path: that of the files without endings")
    return prefix if "://" in prefix else os.path.join(path.parent, prefix)


def _stages(given: dict[str, Any], name: str) -> Stages:
    """A number, or pairs as tuples, as a ``Loader`` takes them."""
    stages = given[name]
    StepPlan(stages)  # refuses what is neither
    return stages if not isinstance(stages, list) else [(start, size) for start, size in stages]


def _flag(given: dict[str, Any], name: str) -> bool:
    if not isinstance(given[name], bool):
        raise ValueError(f"{name}={given[name]!r} must be true or false")
    return given[name]


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r} must be an object of names and values")
    return value


def _refuse_keys(what: str, given: dict[str, Any], *, known: set[str], needed: set[str]) -> None:
    if unknown := [key for key in given if key not in known]:
        raise ValueError(f"{what} has the keys {unknown}, must have only of {sorted(known)}")
    if missing := sorted(needed - given.keys()):
        raise ValueError(f"{what} must have {missing}")
