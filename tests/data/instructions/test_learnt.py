"""What is to be learnt is read from the modes of sequences, however documents are cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder
from megablocks_core.data.instructions.learnt import (
    document_bounds,
    loss_counts,
    masks,
    ranges,
    refuse_other_modes,
)

runs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), max_size=5)


def write(prefix, documents, multimodal=True):
    with IndexedDatasetBuilder(prefix, np.int32, multimodal=multimodal, overwrite=True) as builder:
        for document in documents:
            lengths = [length for length, _ in document]
            modes = [mode for _, mode in document] if multimodal else None
            builder.add_document(np.arange(sum(lengths)), lengths, modes)
    return IndexedDataset(prefix)


@settings(max_examples=40)  # each writes files
@given(documents=st.lists(runs, min_size=1, max_size=5), limit=st.integers(0, 12), pick=st.data())
def test_equals_a_plain_loop(tmp_path_factory, documents, limit, pick):
    dataset = write(tmp_path_factory.mktemp("x") / "x", documents)
    plain = [[mode for length, mode in document for _ in range(length)] for document in documents]
    kept = np.array([min(len(mask), limit) for mask in plain])
    bounds = document_bounds(dataset)
    assert np.diff(bounds).tolist() == [len(mask) for mask in plain]
    assert loss_counts(dataset, kept).tolist() == [sum(mask[1:limit]) for mask in plain]
    some = [number for number, mask in enumerate(plain) if mask]
    chosen = pick.draw(st.lists(st.sampled_from(some), max_size=6)) if some else []
    found = masks(dataset, np.array(chosen, np.int64), kept[np.array(chosen, np.int64)])
    assert found.tolist() == [one for number in chosen for one in plain[number][:limit]]


def test_without_modes_all_but_the_first_is_learnt(tmp_path):
    dataset = write(tmp_path / "x", [[(3, 0), (2, 0)], [], [(1, 0)]], multimodal=False)
    assert loss_counts(dataset, np.array([4, 0, 1])).tolist() == [3, 0, 0]
    assert masks(dataset, np.array([0, 2]), np.array([4, 1])).tolist() == [1.0] * 5


def test_other_modes_are_refused(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.int32, multimodal=True) as builder:
        builder.add_document([1, 2], [1, 1], [1, 2])
    with pytest.raises(ValueError, match="mode of sequence 1 is 2, must be 1"):
        refuse_other_modes(IndexedDataset(tmp_path / "x"))


def test_ranges():
    found = ranges(np.array([5, 0, 9]), np.array([2, 0, 3]))
    assert found.tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], np.int64), np.array([], np.int64)).tolist() == []
