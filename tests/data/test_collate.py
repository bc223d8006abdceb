"""Samples of unequal length become one batch without padding, and documents stay apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import GPTDataset, collate_packed, dense_mask
from megablocks_core.data.collate import cut_sequences

ROWS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=6)


@given(rows=ROWS, room=st.integers(0, 5))
def test_rows_are_laid_end_to_end(rows, room):
    total = sum(map(len, rows))
    batch = collate_packed(rows, length=total + room)
    assert batch["tokens"].tolist() == [sum(rows, []) + room * [0]]
    labels = [token for row in rows for token in [*row[1:], 0]]
    assert batch["labels"].tolist() == [labels + room * [0]]
    mask = [1.0 * (place + 1 < len(row)) for row in rows for place in range(len(row))]
    assert batch["loss_mask"].tolist() == [mask + room * [0.0]]
    assert batch["position_ids"].tolist() == [
        [place for row in rows for place in range(len(row))] + list(range(room))
    ]
    bounds = [0, *np.cumsum([len(row) for row in rows] + [room] * (room > 0)).tolist()]
    assert batch["cu_seqlens"].tolist() == batch["cu_seqlens_host"] == bounds
    assert batch["max_seqlen"] == max(max(map(len, rows)), room)
    assert type(batch["max_seqlen"]) is int
    assert {batch[name].shape for name in ("tokens", "labels")} == {(1, total + room)}
    assert {batch[name].dtype.name for name in ("tokens", "labels", "position_ids")} == {"int64"}
    assert batch["loss_mask"].dtype == np.float32


def test_f_119_an_end_token_that_is_also_the_padding_keeps_its_loss():
    batch = collate_packed([[5, 0, 7]])
    assert batch["labels"].tolist() == [[0, 7, 0]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0]]
    padded = collate_packed([[5, 0, 7]], length=5)
    assert padded["loss_mask"].tolist() == [[1, 1, 0, 0, 0]]
    assert padded["cu_seqlens"].tolist() == [0, 3, 5]


def test_samples_of_a_dataset_keep_their_documents(stream):
    dataset = GPTDataset(stream([3, 6, 1, 9, 4]), 4, seed=0)
    packed = collate_packed([dataset[k] for k in (3, 0, 2)])
    batch = dataset.batch([3, 0, 2])
    for name, value in packed.items():
        assert np.array_equal(value, batch[name])


def test_batches_are_joined_with_their_numbers(stream):
    dataset = GPTDataset(stream([3, 6, 1, 9, 4]), 4, seed=0)
    joined = collate_packed([dataset.batch([3, 0]), dataset.batch([2])])
    batch = dataset.batch([3, 0, 2])
    assert list(joined) == list(batch)
    for name, value in joined.items():
        assert np.array_equal(value, batch[name])
    padded = collate_packed([dataset.batch([1])], length=6)
    assert padded["document_ids"].tolist()[-1] == -1
    assert len(padded["document_ids"]) == len(padded["cu_seqlens"]) - 1
    assert padded["sample_ids"].tolist() == [1]


def test_a_mask_given_without_labels_is_that_of_the_labels():
    batch = collate_packed([{"tokens": [1, 2, 3], "loss_mask": [0, 1, 1]}])
    assert batch["loss_mask"].tolist() == [[0, 1, 0]]
    given = {"tokens": [1, 2], "labels": [2, 3], "loss_mask": [0, 1]}
    assert collate_packed([given])["loss_mask"].tolist() == [[0, 1]]
    assert given["loss_mask"] == [0, 1]


@given(rows=ROWS, length=st.integers(1, 4))
def test_cut_rows_see_none_other(rows, length):
    batch = collate_packed([*rows], length=-(-sum(map(len, rows)) // length) * length)
    batch["document_ids"] = 100 * np.arange(len(batch["cu_seqlens"]) - 1)
    cut = cut_sequences(batch, length)
    bounds = cut["cu_seqlens"].tolist()
    total = batch["tokens"].size
    assert set(bounds) == {*batch["cu_seqlens"].tolist(), *range(0, total + 1, length)}
    assert sorted(set(bounds)) == bounds
    assert cut["max_seqlen"] == np.diff(bounds).max() <= length
    positions = [place for a, b in zip(bounds, bounds[1:], strict=False) for place in range(b - a)]
    assert cut["position_ids"].tolist() == [positions]
    assert len(set(cut["document_ids"].tolist())) == len(bounds) - 1
    for name in ("tokens", "labels", "loss_mask"):
        assert cut[name] is batch[name]


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="length=2 must divide the batch of 3 tokens"):
        cut_sequences(collate_packed([[1, 2, 3]]), 2)


def test_a_dense_mask_is_causal_inside_documents():
    assert dense_mask([0, 2, 3]).tolist() == [
        [True, False, False],
        [True, True, False],
        [False, False, True],
    ]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "must hold at least one sample"),
        ([[1], []], r"samples\[1\] must hold at least one token"),
        ([{"tokens": [1, 2], "labels": [1]}], r"samples\[0\]\['labels'\] of 1 entries"),
        ([[1, 2], [3, 4]], "samples of 4 tokens must fit into length=3"),
        ([{"tokens": [1], "sample_ids": [0]}, [2]], "sample_ids must be given for every sample"),
    ],
)
def test_what_does_not_fit_is_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        collate_packed(samples, length=3)
