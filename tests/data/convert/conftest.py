"""Indexed datasets to convert, and how two are compared."""

from pathlib import Path

import numpy as np
import pytest

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder


def write(prefix, documents, dtype="uint16", tokenizer=None):
    with IndexedDatasetBuilder(prefix, dtype, tokenizer=tokenizer) as builder:
        for document in documents:
            builder.add_document(np.asarray(document, dtype))
    return prefix


def documents(prefix):
    """The documents of a dataset, every byte of it checked."""
    dataset = IndexedDataset(prefix)
    dataset.verify()
    return [document.tolist() for document in dataset]


def contents(prefix):
    """The bytes of its files."""
    return [Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx", ".hashes")]


def some_documents(count=300, seed=0, most=60_000, end=None):
    """Documents of several lengths, the first and last ones short, some of a single id."""
    draw = np.random.default_rng(seed)
    ends = [] if end is None else [end]
    lengths = draw.choice([1, 2, 5, 300, 1200], count)
    return [[*draw.integers(1, most, length).tolist(), *ends] for length in lengths]


@pytest.fixture
def corpus(tmp_path):
    """The prefix of a dataset and its documents, none of them empty."""
    rows = some_documents()
    return write(tmp_path / "corpus", rows), rows
