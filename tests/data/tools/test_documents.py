"""Documents are found block by block, and compared by their ids alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder
from megablocks_core.data.tools import DamagedDataset
from megablocks_core.data.tools.documents import (
    blocks,
    bounds_of,
    equal_tokens,
    open_dataset,
    pieces,
    refuse_floats,
    refuse_two_tokenizers,
)

from .conftest import build


@settings(max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=9),
    size=st.integers(1, 4),
)
def test_blocks_have_the_bounds_of_every_document(tmp_path_factory, documents, size):
    prefix = tmp_path_factory.mktemp("x") / "a"
    with IndexedDatasetBuilder(prefix, dtype=np.uint8) as builder:
        for lengths in documents:  # of several sequences, of none, of empty ones
            builder.add_document(np.zeros(sum(lengths), np.uint8), lengths)
    dataset = IndexedDataset(prefix)
    starts = [dataset.document_start(number) for number in range(len(documents) + 1)]
    found = list(blocks(dataset, documents=size))
    assert [first for first, _ in found] == list(range(0, len(documents), size))
    for first, bounds in found:
        assert bounds.dtype == np.int64
        assert bounds.tolist() == starts[first : first + size + 1]


def test_a_url_is_read_in_ranges(tmp_path):
    build(tmp_path / "a", [[1, 2], [], [3]])
    dataset = IndexedDataset(f"file://{tmp_path}/a")
    assert bounds_of(dataset, 1, 3).tolist() == [2, 2, 3]
    assert equal_tokens(dataset, (0, 2), IndexedDataset(tmp_path / "a"), (0, 2))


def test_equal_documents_have_equal_ids_whatever_their_dtype(tmp_path, monkeypatch):
    one = IndexedDataset(build(tmp_path / "a", [[1, 2, 3, 7]]))
    other = IndexedDataset(build(tmp_path / "b", [[1, 2, 4, 1, 2, 3, 7]], np.int64))
    monkeypatch.setattr(pieces, "__kwdefaults__", {"tokens": 2})
    starts = [start for start in range(5) if equal_tokens(one, (0, 3), other, (start, start + 3))]
    assert starts == [3]
    assert not equal_tokens(one, (0, 2), other, (0, 3))
    assert equal_tokens(one, (2, 2), other, (0, 0))


def test_what_is_damaged_or_cannot_be_compared_is_refused(tmp_path):
    whole = build(tmp_path / "a", [[1, 2]], tokenizer="one")
    (tmp_path / "b.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-1])
    (tmp_path / "b.idx").write_bytes((tmp_path / "a.idx").read_bytes())
    with pytest.raises(DamagedDataset, match="must hold 4 bytes"):
        open_dataset(tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        open_dataset(tmp_path / "c")
    floats = IndexedDataset(build(tmp_path / "f", [[0.5]], np.float64))
    with pytest.raises(ValueError, match="holds float64, must hold integers"):
        refuse_floats(floats)
    other = build(tmp_path / "o", [[1]], tokenizer="two")
    unnamed = build(tmp_path / "u", [[1]])
    opened = [IndexedDataset(prefix) for prefix in (whole, unnamed, other)]
    refuse_two_tokenizers(opened[:2])
    with pytest.raises(ValueError, match="'two' must be 'one', as that of .*/a"):
        refuse_two_tokenizers(opened)
