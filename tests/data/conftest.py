"""A corpus on disk from a list of documents."""

import itertools

import numpy as np
import pytest

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder


@pytest.fixture
def corpus(tmp_path):
    """Return a function that writes documents (lists of ids, one sequence each)."""
    numbers = itertools.count()

    def write(documents, dtype=np.int32):
        prefix = tmp_path / f"corpus-{next(numbers)}"
        with IndexedDatasetBuilder(prefix, dtype=dtype) as builder:
            for document in documents:
                builder.add_document(document)
        return IndexedDataset(prefix)

    return write


@pytest.fixture
def stream(corpus):
    """Return a function that writes documents of given lengths holding 0, 1, 2, ..."""

    def write(lengths):
        bounds = itertools.accumulate(lengths, initial=0)
        return corpus([range(a, b) for a, b in itertools.pairwise(bounds)])

    return write
