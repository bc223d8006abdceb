"""The documents of a dataset, and of a step of a run, to read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from megablocks_core.data.checks import whole_number
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.loader import Loader
from megablocks_core.data.steps import StepPlan
from megablocks_core.data.tools.decoding import Decoder, decoder_of
from megablocks_core.data.tools.documents import open_dataset
from megablocks_core.data.tools.recipe import Recipe

MOST_TOKENS = 1 << 20  # of a document that are shown, unless more are asked for


@dataclass(frozen=True)
class Part:
    """A document, or the part of one that a sample has.

    Attributes:
        source: Its name in the recipe; of a dataset alone, the prefix.
        prefix: Of the dataset.
        document: Its number there.
        start: The first token, counted in the document.
        length: How many tokens.
        ids: They themselves, ``[length]`` or as many as were asked for.
        text: Of ``ids``; ``None`` without a tokenizer.
    """

    source: str
    prefix: str
    document: int
    start: int
    length: int
    ids: np.ndarray
    text: str | None


@dataclass(frozen=True)
class Sample:
    """A sample of a step: its number in the run, and what it is made of, in order."""

    number: int
    parts: list[Part]


def show(
    prefix: str | os.PathLike[str],
    document: int,
    *,
    tokenizer: str | None = None,
    most: int = MOST_TOKENS,
) -> Part:
    """Return a document of a dataset, its first ``most`` tokens.

    The text is there for a dataset of ``bytes``, or with a ``tokenizer``.

    Raises:
        ValueError: The tokenizer is none, or another than the manifest names; ``most`` is negative.
        IndexError: There is no such document.
    """
    dataset = open_dataset(prefix)
    document = whole_number("document", document)
    if not 0 <= document < dataset.num_documents:
        raise IndexError(f"document {document} of {dataset.num_documents} in {dataset.prefix}")
    recorded = dataset.manifest.tokenizer if dataset.manifest else None
    decoder = decoder_of(recorded, tokenizer)
    length = dataset.document_start(document + 1) - dataset.document_start(document)
    return _part(dataset.prefix, dataset, (document, 0, length), decoder, most)


def show_step(
    recipe: Recipe, step: int, *, tokenizer: str | None = None, most: int = MOST_TOKENS
) -> list[Sample]:
    """Return the samples of a step's global batch: those that a ``Loader`` makes, in its order.

    Steps count from 0. The parts of a sample end to end are its ``tokens``; the label of the last
    one comes after them.

    Raises:
        ValueError: The tokenizer is none, or another than the manifests name.
        IndexError: There is no such step.
    """
    options = recipe.loader_options
    loader = Loader(recipe.dataset, micro_batch_size=1, **options)
    first = StepPlan(options["global_batch_size"]).start(whole_number("step", step, 0))
    decoder = decoder_of(recipe.dataset.tokenizer, tokenizer)
    sources: Any = recipe.dataset.sources
    return [
        Sample(
            number,
            [
                _part(place.source, sources[place.source].indexed, taken, decoder, most)
                for taken in place.documents
            ],
        )
        for number, place in enumerate(loader.locate(step), first)
    ]


def _part(
    source: str,
    dataset: IndexedDataset,
    taken: tuple[int, int, int],
    decoder: Decoder | None,
    most: int,
) -> Part:
    document, start, stop = taken
    most = whole_number("most", most, 0)
    begin = dataset.document_start(document) + start
    tokens: Any = dataset.tokens
    ids = np.asarray(tokens[begin : begin + min(stop - start, most)])
    text = decoder(ids.tolist()) if decoder else None
    return Part(source, dataset.prefix, document, start, stop - start, ids, text)
