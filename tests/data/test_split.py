"""Document splits follow the rule: normalise, add up, round each bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import split_documents


@pytest.mark.parametrize(
    ("weights", "documents", "bounds"),
    [
        ("969,30,1", 10, [(0, 10), (10, 10), (10, 10)]),
        ("969,30,1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("99,8,2", 100, [(0, 91), (91, 98), (98, 100)]),
        ("90,8,2", 3, [(0, 3), (3, 3), (3, 3)]),
    ],
)
def test_f_127_bounds(weights, documents, bounds):
    splits = split_documents(documents, weights)
    assert [(s.documents.start, s.documents.stop) for s in splits.values()] == bounds
    assert [s.name for s in splits.values()] == list(splits) == ["train", "valid", "test"]
    assert split_documents(documents, [float(w) for w in weights.split(",")]) == splits


@given(
    documents=st.integers(0, 10**12),
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=5).filter(lambda w: sum(w) > 1e-3),
)
def test_f_127_splits_never_overlap_and_hold_every_document(documents, weights):
    splits = list(split_documents(documents, weights, names="abcde").values())
    assert len(splits) == 5
    assert splits[0].documents.start == 0
    assert splits[-1].documents.stop == documents
    for before, after in zip(splits[:-1], splits[1:], strict=True):
        assert before.documents.stop == after.documents.start
        assert len(before.documents) >= 0
        assert before.documents.start <= before.documents.stop


def test_fewer_weights_leave_the_last_splits_empty():
    splits = split_documents(7, "1", names=("train", "valid"))
    assert splits["train"].documents == range(7)
    assert len(splits["valid"].documents) == 0


@pytest.mark.parametrize("weights", ["", "a,b", "1,-1", "0,0", "1,2,3,4", "inf,1", "nan", []])
def test_weights_that_cut_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="weights="):
        split_documents(10, weights)
