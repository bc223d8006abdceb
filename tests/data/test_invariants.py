"""Whoever reads a recipe, in whatever portions, reads the same samples in the same order.

A recipe is a dataset or a blend and a schedule; ranks, micro-batches, threads and places to stop
are not part of it.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megablocks_core.data import (
    BlendedDataset,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    Loader,
    Split,
)

NAMES = "abc"


class Ranks:
    """A group as far as a loader looks at one."""

    def __init__(self, size, rank):
        self.size, self.rank = size, rank


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Three corpora of up to 14 documents, some empty; no two tokens are equal."""
    numbers, folder = np.random.default_rng(0), tmp_path_factory.mktemp("corpora")
    token, found = 0, []
    for name, most in zip(NAMES, (14, 6, 9), strict=True):
        with IndexedDatasetBuilder(folder / name, dtype=np.int32) as builder:
            for length in numbers.integers(0, 14, most).tolist():
                builder.add_document(range(token, token + length))
                token += length
        found.append(IndexedDataset(folder / name))
    return found


@st.composite
def sources(draw, length):
    """Arguments of a dataset, for each corpus."""
    arguments = []
    for place, documents in enumerate((14, 6, 9)):
        chosen: Any = range(documents)
        if draw(st.booleans()):
            chosen = np.array(sorted(draw(st.sets(st.integers(0, documents - 1), min_size=3))))
        arguments.append(
            {
                "sequence_length": length,
                "seed": draw(st.integers(0, 2**60)) * 3 + place,
                "split": Split("s", chosen),
                "cross_document_loss": draw(st.booleans()),
            }
        )
    return arguments


@st.composite
def schedules(draw, most):
    starts = sorted(draw(st.sets(st.integers(1, 30), max_size=2)))
    return [(start, draw(st.integers(2, most))) for start in [0, *starts]]


@st.composite
def recipes(draw):
    """What decides on the samples: sources, weights, and how many."""
    length = draw(st.integers(2, 6))
    kind = draw(st.sampled_from(["one", "exhaustive", "weights", "segments"]))
    starts = [0]
    if kind == "segments":
        starts += sorted(draw(st.sets(st.integers(1, 40), max_size=2)))
    weight = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)
    weights = [(start, dict(zip(NAMES, draw(weight), strict=True))) for start in starts]
    return {
        "kind": kind,
        "sources": draw(sources(length)),
        "weights": weights,
        "seed": draw(st.integers(0, 2**64 - 1)),
        "num_samples": draw(st.integers(1, 50)),
    }


@st.composite
def portions(draw):
    """Who reads it, and how."""
    return {
        "dp": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "micro_batch_size": draw(st.integers(1, 3)),
        "workers": draw(st.sampled_from([0, 0, 0, 1, 3])),
        "prefetch": draw(st.integers(1, 4)),
        "global_batch_size": draw(schedules(16)),
    }


def build(recipe, corpora):
    """The dataset, and whether it is one without too few tokens."""
    made = {
        name: GPTDataset(indexed, **arguments)
        for name, indexed, arguments in zip(NAMES, corpora, recipe["sources"], strict=True)
    }
    if recipe["kind"] == "one":
        return made["a"].resized(recipe["num_samples"])
    if recipe["kind"] == "exhaustive":
        return BlendedDataset(made, seed=recipe["seed"])
    return BlendedDataset(
        made,
        seed=recipe["seed"],
        weights=recipe["weights"],
        num_samples=recipe["num_samples"],
        max_repetition=10**6,
    )


def read(dataset, portion, *, state=None, steps=None):
    """Return the samples of the steps, in the order of the global batch, and the last state."""
    arguments = {name: value for name, value in portion.items() if name != "dp"}
    groups: list[Any] = [Ranks(portion["dp"], rank) for rank in range(portion["dp"])]
    loaders = [Loader(dataset, drop_last=False, group=g, **arguments) for g in groups]
    if state:
        for loader in loaders:
            loader.load_state_dict(state)
    found = []
    for number, step_of_ranks in enumerate(zip(*loaders, strict=True), 1):
        counted, samples = 0, []
        for micro_batches in zip(*(step.micro_batches for step in step_of_ranks), strict=True):
            for batch in micro_batches:
                rows = batch["tokens"].view(portion["micro_batch_size"], -1)
                counted += int(batch["loss_mask"].sum())
                samples += list(zip(batch["sample_ids"].tolist(), rows.tolist(), strict=True))
        whole = step_of_ranks[0].num_tokens
        assert counted == whole == step_of_ranks[-1].num_tokens
        taken = loaders[0].consumed - (
            found[-1][0] + 1 if found else (state or {}).get("consumed", 0)
        )
        found += samples[:taken]  # what stands in comes last
        if number == steps:
            break
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return found, states[0]


def every_sample_once(recipe, dataset):
    """Check that an epoch has each window once, and a blend's sources neither repeat nor skip."""
    if recipe["kind"] == "one":
        epoch = dataset.samples_per_epoch
        starts = dataset.resized(3 * epoch).starts(np.arange(3 * epoch)).reshape(3, epoch)
        assert all(len(set(row.tolist())) == epoch for row in starts)
        return
    numbers, indices = dataset.find(np.arange(len(dataset)))
    for number, source in enumerate(dataset.sources.values()):
        given = indices[numbers == number].tolist()
        assert given == list(range(len(given)))
        if recipe["kind"] == "exhaustive":
            assert len(given) == source.samples_per_epoch


def check(recipe, first, second, steps, corpora):
    """Check one recipe, read by one reader up to some step and by another one from there."""
    try:
        dataset = build(recipe, corpora)
    except ValueError as error:  # documents that hold no sample
        assert "tokens, must hold at least" in str(error)
        return
    every_sample_once(recipe, dataset)
    batch = dataset.batch(range(len(dataset)))
    rows = batch["tokens"].reshape(len(dataset), -1).tolist()
    plain = list(enumerate(rows))
    head, state = read(dataset, first, steps=steps)
    tail, _ = read(build(recipe, corpora), second, state=state)
    assert head + tail == plain
    places = [dataset.locate(k) for k in range(len(dataset))]
    by_name = dict(zip(NAMES, corpora, strict=True))
    for place, row in zip(places, rows, strict=True):
        indexed = by_name.get(place.source, corpora[0])
        assert row == [
            token
            for document, start, stop in place.documents
            for token in indexed[document][start:stop].tolist()
        ]
    if recipe["kind"] == "exhaustive":
        most = Counter(token for row in rows for token in row).most_common(1)
        assert not most or most[0][1] == 1


CASE: dict[str, Any] = {
    "recipe": recipes(),
    "first": portions(),
    "second": portions(),
    "steps": st.integers(1, 5),
}


@given(**CASE)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_order_is_the_recipes_alone(corpora, recipe, first, second, steps):
    check(recipe, first, second, steps, corpora)


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(10))
@given(**CASE)
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_order_of_10_000_recipes_is_the_recipes_alone(
    corpora, thousand, recipe, first, second, steps
):
    check(recipe, first, second, steps, corpora)
