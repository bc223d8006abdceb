"""Windows of a stream are cut where its documents begin, whichever documents it is made of."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder, Split
from megablocks_core.data import stream as module
from megablocks_core.data.stream import Stream

LENGTHS = [3, 0, 8, 1, 0, 0, 9, 5, 0, 7, 11, 0]


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """Twelve documents, some empty, that hold 0, 1, 2, ...; the third has two sequences."""
    prefix = tmp_path_factory.mktemp("stream") / "a"
    ends = np.cumsum(LENGTHS)
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        for number, (end, length) in enumerate(zip(ends.tolist(), LENGTHS, strict=True)):
            cut = [3, 5] if number == 2 else None
            builder.add_document(list(range(end - length, end)), cut)
    return IndexedDataset(prefix)


def plain_parts(documents, begins, length):
    """Write the parts down one token at a time."""
    ends = np.cumsum(LENGTHS).tolist()
    tokens = [
        (document, offset, ends[document] - LENGTHS[document] + offset)
        for document in documents
        for offset in range(LENGTHS[document])
    ]
    parts = []
    for window, begin in enumerate(begins):
        for column, (document, offset, token) in enumerate(tokens[begin : begin + length]):
            if column and parts[-1][2] == document:
                parts[-1][5] += 1
            else:
                parts.append([window, column, document, offset, token, 1])
    return parts


CHOICES = st.one_of(
    st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda ends: range(*sorted(ends))),
    st.lists(st.integers(0, 11), unique=True).map(lambda ds: np.array(sorted(ds), np.int64)),
)


@pytest.mark.parametrize("in_memory", [0, module.IN_MEMORY])
@given(documents=CHOICES, data=st.data())
def test_parts_equal_those_written_by_hand(indexed, in_memory, documents, data):
    total = sum(LENGTHS[document] for document in documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "IN_MEMORY", in_memory)
        found = Stream(indexed, Split("any", documents))
        assert found.num_tokens == total
        if not total:
            return
        length = data.draw(st.integers(1, total))
        begins = data.draw(st.lists(st.integers(0, total - length), max_size=4))
        parts = found.parts(np.array(begins, np.int64), length)
    assert np.stack(parts, 1).tolist() == plain_parts(documents, begins, length)
    tokens = [
        indexed.tokens[start : start + n].tolist()
        for start, n in zip(parts.starts, parts.lengths, strict=True)
    ]
    assert tokens == [
        list(range(start, start + n)) for start, n in zip(parts.starts, parts.lengths, strict=True)
    ]


def test_offsets_of_a_split_are_taken_as_they_are(indexed):
    documents = np.array([2, 7, 10])
    split = Split("some", documents, np.array([0, 8, 13, 24]))
    parts = Stream(indexed, split).parts(np.array([6]), 8)
    assert np.stack(parts, 1).tolist() == plain_parts([2, 7, 10], [6], 8)


def test_offsets_of_another_dataset_are_refused(indexed):
    split = Split("some", np.array([2, 7, 10]), np.array([0, 8, 12, 23]))
    with pytest.raises(ValueError, match="document 7 has 4 tokens, must say 5"):
        Stream(indexed, split)


@pytest.mark.parametrize("documents", [range(2, 9), np.array([0, 3, 6])])
def test_pickles_without_what_it_built(indexed, documents):
    stream = Stream(indexed, Split("s", documents))
    expected = stream.parts(np.array([2]), 3)
    again = pickle.loads(pickle.dumps(stream))
    assert all(map(np.array_equal, expected, again.parts(np.array([2]), 3)))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Split("s", range(5, 13)), "must lie in 12 documents"),
        (Split("s", range(0, 8, 2)), "must leave out no document"),
        (Split("s", np.array([0, 12])), "split 's' must lie in 12 documents"),
        (Split("s", np.array([-1, 2])), "split 's' must lie in 12 documents"),
        (Split("s", np.array([1, 1])), "must be in increasing order"),
        (Split("s", np.array([2, 1])), "must be in increasing order"),
        (Split("s", np.array([1.0])), "must be one row of int64"),
        (Split("s", np.array([1, 2]), np.array([0, 8])), "must have one offset more, not 2"),
    ],
)
def test_documents_that_are_none_are_refused(indexed, split, message):
    with pytest.raises(ValueError, match=message):
        Stream(indexed, split)
