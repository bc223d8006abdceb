"""What the sources of a recipe give over its run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megablocks_core.data.sources import epoch_of
from megablocks_core.data.steps import StepPlan
from megablocks_core.data.tools.recipe import Recipe

POINTS = 101  # of a curve over steps


@dataclass(frozen=True)
class SourceUse:
    """What one source gives.

    Attributes:
        name: In the recipe.
        prefix: Of its dataset.
        weight: Its share of the mixture at the start, as asked; 1 is all.
        share: Its share of the samples of the run.
        documents: Of its split.
        samples_per_epoch: How many samples there are before it repeats itself.
        samples: It gives in the run.
        tokens: Of these samples.
        epochs: How often that goes through it.
        repetitions: How often a sample of it comes at most.
    """

    name: str
    prefix: str
    weight: float
    share: float
    documents: int
    samples_per_epoch: int
    samples: int
    tokens: int
    epochs: float
    repetitions: int


@dataclass(frozen=True)
class RecipeUse:
    """What a recipe gives.

    Attributes:
        path: Of its file.
        steps: How many.
        samples: Of all steps.
        tokens: Of all samples.
        sources: By source.
    """

    path: str
    steps: int
    samples: int
    tokens: int
    sources: list[SourceUse]


@dataclass(frozen=True)
class Curves:
    """What sources have given up to some steps.

    Attributes:
        steps: So many steps are done.
        shares: By source, its share of the samples since the step before in ``steps``.
        epochs: By source, how often it was gone through.
    """

    steps: list[int]
    shares: dict[str, list[float]]
    epochs: dict[str, list[float]]


def inspect_recipe(recipe: Recipe) -> RecipeUse:
    """Count what each source gives over the steps of a recipe; nothing is read for it."""
    blend = recipe.dataset
    samples = StepPlan(recipe.loader_options["global_batch_size"]).start(recipe.steps)
    counts = blend.counts(samples)
    weights = blend.segments[0][1]
    whole = sum(float(weight) for weight in weights.values())
    sources: dict[str, Any] = dict(blend.sources)
    rows = [
        SourceUse(
            name=name,
            prefix=source.indexed.prefix,
            weight=float(weights[name]) / whole,
            share=counts[name] / samples if samples else 0.0,
            documents=len(source.split.documents),
            samples_per_epoch=epoch_of(source),
            samples=counts[name],
            tokens=counts[name] * blend.sequence_length,
            epochs=counts[name] / epoch_of(source),
            repetitions=math.ceil(counts[name] / epoch_of(source)),
        )
        for name, source in sources.items()
    ]
    return RecipeUse(recipe.path, recipe.steps, samples, samples * blend.sequence_length, rows)


def curves(recipe: Recipe, *, points: int = POINTS) -> Curves:
    """Count what each source has given at some steps, evenly from 0 to the last."""
    plan = StepPlan(recipe.loader_options["global_batch_size"])
    last = recipe.steps
    steps = sorted({round(last * point / (points - 1)) for point in range(points)})
    given = [recipe.dataset.counts(plan.start(step)) for step in steps]
    shares: dict[str, list[float]] = {}
    epochs: dict[str, list[float]] = {}
    totals = [sum(counts.values()) for counts in given]
    for name, source in recipe.dataset.sources.items():
        own = [counts[name] for counts in given]
        epochs[name] = [count / epoch_of(source) for count in own]
        between = zip(own, own[1:], totals, totals[1:], strict=False)
        shares[name] = [(b - a) / (d - c) for a, b, c, d in between]
    return Curves(steps, shares, epochs)
