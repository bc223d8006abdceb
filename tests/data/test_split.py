"""Document splits follow the rule: normalise, add up, round each bound."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import split_documents


def _runs(splits) -> list[range]:
    return [split.documents for split in splits.values()]


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
    assert [(run.start, run.stop) for run in _runs(splits)] == bounds
    assert [s.name for s in splits.values()] == list(splits) == ["train", "valid", "test"]
    assert split_documents(documents, [float(w) for w in weights.split(",")]) == splits


@given(
    documents=st.integers(0, 10**12),
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=5).filter(lambda w: sum(w) > 1e-3),
)
def test_f_127_splits_never_overlap_and_hold_every_document(documents, weights):
    runs = _runs(split_documents(documents, weights, names=list("abcde")))
    assert len(runs) == 5
    assert runs[0].start == 0
    assert runs[-1].stop == documents
    for before, after in pairwise(runs):
        assert before.stop == after.start
        assert before.start <= before.stop


def test_fewer_weights_leave_the_last_splits_empty():
    splits = split_documents(7, "1", names=("train", "valid"))
    assert splits["train"].documents == range(7)
    assert len(splits["valid"].documents) == 0


@pytest.mark.parametrize("weights", ["", "a,b", "1,-1", "0,0", "1,2,3,4", "inf,1", "nan", []])
def test_weights_that_cut_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="weights="):
        split_documents(10, weights)
