"""Batches are cut without a document lost, and ids never wrap."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data.convert.documents import Batch, stored_as


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 12))
def test_runs_are_the_same_documents_in_pieces_of_a_size(lengths, most):
    tokens = np.arange(sum(lengths))
    batch = Batch(tokens, np.array(lengths, np.int64), 7)
    runs = list(batch.runs(most))
    found = [document.tolist() for run in runs for document in run.documents()]
    assert found == [document.tolist() for document in batch.documents()]
    assert [len(document) for document in found] == lengths
    for run in runs:
        assert len(run.tokens) <= most or len(run.lengths) == 1
        assert len(run.tokens) == run.lengths.sum()
    for run, after in itertools.pairwise(runs):  # no document of the next would have fitted
        assert len(run.tokens) + after.lengths[0] > most


@pytest.mark.parametrize("token", [-1, 256])
def test_an_id_that_does_not_fit_is_refused(token):
    assert stored_as(np.array([0, 255]), np.dtype("u1"), "x").tolist() == [0, 255]
    with pytest.raises(ValueError, match=f"x: token id {token} must be from 0 to 255"):
        stored_as(np.array([3, token, 5]), np.dtype("u1"), "x")


def test_floats_do_not_become_ids():
    with pytest.raises(ValueError, match="tokens of float32 do not convert to uint16"):
        stored_as(np.ones(2, np.float32), np.dtype("u2"), "x")
    assert stored_as(np.empty(0, np.float32), np.dtype("u2"), "x").dtype == np.uint16
