"""Samples are windows of the token stream, each once an epoch, with their documents' bounds."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import (
    GPTDataset,
    IndexedDatasetBuilder,
    Split,
    dense_mask,
    split_documents,
)
from megablocks_core.data.indexed import IndexedDataset


def by_start(dataset):
    return sorted((dataset[k] for k in range(len(dataset))), key=lambda s: s["tokens"][0])


def plain_sample(documents, window, length, cross_document_loss):
    """Write a sample down one token at a time."""
    stream = [(d, token) for d, document in enumerate(documents) for token in document]
    part = stream[window * length : window * length + length + 1]
    positions, bounds = [0], [0]
    for i in range(1, length):
        same = part[i][0] == part[i - 1][0]
        positions.append(positions[-1] + 1 if same else 0)
        if not same:
            bounds.append(i)
    crossing = [part[i][0] != part[i + 1][0] for i in range(length)]
    return {
        "tokens": [token for _, token in part[:-1]],
        "labels": [token for _, token in part[1:]],
        "loss_mask": [float(cross_document_loss or not c) for c in crossing],
        "position_ids": positions,
        "cu_seqlens": [*bounds, length],
    }


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=10).filter(lambda x: sum(x) > 1),
    length=st.integers(1, 12),
    cross=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_samples_equal_those_written_by_hand(tmp_path_factory, lengths, length, cross, seed):
    ends = np.cumsum(lengths)
    documents = [list(range(e - n, e)) for e, n in zip(ends.tolist(), lengths, strict=True)]
    prefix = tmp_path_factory.mktemp("d") / "a"
    with IndexedDatasetBuilder(prefix, dtype=np.int32) as builder:
        for document in documents:
            builder.add_document(document)
    length = min(length, sum(lengths) - 1)
    dataset = GPTDataset(IndexedDataset(prefix), length, seed=seed, cross_document_loss=cross)
    for window, sample in enumerate(by_start(dataset)):
        plain = plain_sample(documents, window, length, cross)
        assert {name: value.tolist() for name, value in sample.items()} == plain
    samples = np.arange(len(dataset))
    masks = sum(int(dataset[k]["loss_mask"].sum()) for k in range(len(dataset)))
    assert dataset.num_loss_tokens(samples) == masks


def test_types(stream):
    sample = GPTDataset(stream([3, 6]), 4, seed=1)[0]
    kinds = {name: (value.dtype.name, value.shape) for name, value in sample.items()}
    assert kinds.pop("cu_seqlens")[0] == "int64"
    assert kinds.pop("loss_mask") == ("float32", (4,))
    assert set(kinds.values()) == {("int64", (4,))}


def test_f_115_samples_share_one_token_with_their_neighbour(stream):
    first, second = by_start(GPTDataset(stream([3, 6]), 4, seed=0))
    assert (first["tokens"].tolist(), first["labels"].tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])
    assert (second["tokens"].tolist(), second["labels"].tolist()) == ([4, 5, 6, 7], [5, 6, 7, 8])


def test_f_116_a_sample_may_begin_inside_a_document(stream):
    second = by_start(GPTDataset(stream([3, 6]), 4, seed=0))[1]
    assert second["tokens"][0] == 4  # offset 1 of document 1
    assert second["cu_seqlens"].tolist() == [0, 4]
    assert len(GPTDataset(stream([9]), 4, seed=0)) == 2


@pytest.mark.parametrize(
    ("lengths", "samples"), [([4, 4], 1), ([5], 1), ([3, 0, 5], 1), ([2, 3, 4], 2), ([3, 6], 2)]
)
def test_f_117_an_epoch_has_floor_of_tokens_less_one_by_length_samples(stream, lengths, samples):
    """In native order an epoch is a pass of its own, so it counts as the case's one epoch.

    The case's counts of several epochs, such as 3 for two of [4, 4], join the end of one epoch
    to the start of the next; here they are 2 times 1, and 3 times 2 = 6 for [2, 3, 4].
    """
    dataset = GPTDataset(stream(lengths), 4, seed=0)
    assert len(dataset) == dataset.samples_per_epoch == samples
    assert samples == (sum(lengths) - 1) // 4


@pytest.mark.parametrize("lengths", [[4], [3], [0], [1, 0, 1], []])
def test_f_117_no_sample_is_an_error_with_tokens_and_length(stream, lengths):
    with pytest.raises(ValueError, match=f"holds {sum(lengths)} tokens, .* sequence_length=4"):
        GPTDataset(stream(lengths), 4, seed=0, num_samples=10)


def test_f_119_real_end_tokens_keep_their_loss(corpus):
    """Native samples are never padded, and the mask goes by place: id 0 is nothing special."""
    sample = GPTDataset(corpus([[5, 0], [7, 0]]), 3, seed=0)[0]
    assert sample["labels"].tolist() == [0, 7, 0]
    assert sample["loss_mask"].tolist() == [1, 1, 1]


def test_f_120_documents_inside_a_sample(corpus):
    indexed = corpus([[5, 0], [7, 8, 9]])
    sample = GPTDataset(indexed, 4, seed=0)[0]
    assert sample["tokens"].tolist() == [5, 0, 7, 8]
    assert sample["labels"].tolist() == [0, 7, 8, 9]
    assert sample["position_ids"].tolist() == [0, 1, 0, 1]
    assert sample["cu_seqlens"].tolist() == [0, 2, 4]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 1]
    masked = GPTDataset(indexed, 4, seed=0, cross_document_loss=False)[0]
    assert masked["loss_mask"].tolist() == [1, 0, 1, 1]


def test_f_120_two_ends_in_a_row_and_an_end_at_the_end(corpus):
    indexed = corpus([[5, 0], [0], [7, 0], [8]])
    sample = GPTDataset(indexed, 5, seed=0, cross_document_loss=False)[0]
    assert sample["tokens"].tolist() == [5, 0, 0, 7, 0]
    assert sample["cu_seqlens"].tolist() == [0, 2, 3, 5]
    assert sample["position_ids"].tolist() == [0, 1, 0, 0, 1]
    assert sample["loss_mask"].tolist() == [1, 0, 0, 1, 0]


FLAGS = ("cross_document_loss", "cross_document_attention", "restart_positions")


@pytest.mark.parametrize("end_token", [None, 0])
@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("restart", [True, False])
def test_f_120_options_do_not_interact(corpus, end_token, loss, attention, restart):
    """By place where the index knows documents, by token where one document holds many."""
    documents = [[5, 0], [7, 8, 9]] if end_token is None else [[5, 0, 7, 8, 9]]
    options = dict(zip(FLAGS, (loss, attention, restart), strict=True))
    dataset = GPTDataset(corpus(documents), 4, seed=0, end_token=end_token, **options)
    sample = dataset[0]
    assert sample["tokens"].tolist() == [5, 0, 7, 8]
    assert sample["labels"].tolist() == [0, 7, 8, 9]
    assert sample["loss_mask"].tolist() == ([1, 1, 1, 1] if loss else [1, 0, 1, 1])
    assert sample["position_ids"].tolist() == ([0, 1, 0, 1] if restart else [0, 1, 2, 3])
    assert sample["cu_seqlens"].tolist() == ([0, 4] if attention else [0, 2, 4])
    assert dense_mask(sample["cu_seqlens"])[2].tolist() == [attention, attention, True, False]
    assert dataset.num_loss_tokens([0]) == 4 - (not loss)
    assert dataset.batch([0])["document_ids"].tolist() == ([0] if attention else [0, 2])


def test_f_120_end_tokens_at_the_ends_of_samples(corpus):
    indexed = corpus([[5, 0, 0, 0, 7, 0, 0, 8, 9]])
    options = {"end_token": 0, "cross_document_loss": False}
    first, second = by_start(GPTDataset(indexed, 4, seed=0, **options))[::-1]
    assert first["tokens"].tolist() == [7, 0, 0, 8]
    assert first["cu_seqlens"].tolist() == [0, 2, 3, 4]
    assert first["loss_mask"].tolist() == [1, 0, 0, 1]
    assert second["tokens"].tolist() == [5, 0, 0, 0]
    assert second["cu_seqlens"].tolist() == [0, 2, 3, 4]
    assert second["position_ids"].tolist() == [0, 1, 0, 0]
    assert second["loss_mask"].tolist() == [1, 0, 0, 0]


def test_documents_chosen_one_by_one_are_a_stream_of_their_own(corpus):
    documents = [[10, 11, 12], [20], [30, 31], [], [40, 41, 42, 43]]
    chosen = Split("some", np.array([0, 2, 3, 4]))
    dataset = GPTDataset(corpus(documents), 4, seed=0, split=chosen)
    first, second = by_start(dataset)
    assert first["tokens"].tolist() == [10, 11, 12, 30]
    assert first["labels"].tolist() == [11, 12, 30, 31]
    assert second["tokens"].tolist() == [31, 40, 41, 42]
    assert second["labels"].tolist() == [40, 41, 42, 43]
    assert second["cu_seqlens"].tolist() == [0, 1, 4]
    places = sorted(dataset.locate(k) for k in range(2))
    assert places == [("some", [(0, 0, 3), (2, 0, 1)]), ("some", [(2, 1, 2), (4, 0, 3)])]
    with pytest.raises(ValueError, match=r"split 'few' \(1 documents of 5\) holds 1 tokens"):
        GPTDataset(corpus(documents), 4, seed=0, split=Split("few", np.array([1])))


def test_places_hold_the_tokens_of_their_samples(stream):
    lengths = [3, 0, 6, 1, 9, 0, 4]
    ends = np.cumsum(lengths)
    dataset = GPTDataset(stream(lengths), 4, seed=1, num_samples=9)
    for sample in range(9):
        source, documents = dataset.locate(sample)
        found = [
            int(ends[document]) - lengths[document] + token
            for document, start, stop in documents
            for token in range(start, stop)
        ]
        assert source == "all"
        assert found == dataset[sample]["tokens"].tolist()


def test_the_fingerprint_tells_what_changes_the_samples(corpus):
    documents = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 12]]
    indexed = corpus(documents)
    plain: dict[str, Any] = {"seed": 1}

    def of(tokens=indexed, length=2, **changes):
        return GPTDataset(tokens, length, **{**plain, **changes}).fingerprint

    assert of() == of(num_samples=99) == of(split=Split("other name", range(3)))
    assert of() == of(tokens=corpus(documents))  # wherever the files lie
    others = [
        of(seed=2),
        of(length=3),
        of(split=Split("s", range(2))),
        of(split=Split("s", np.array([0, 2]))),
        of(split=Split("s", np.array([0, 1]))),
        of(end_token=3),
        of(order="megatron"),
        *(of(**{flag: flag == "cross_document_attention"}) for flag in FLAGS),
        of(tokens=corpus([[1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 99]])),
        of(tokens=corpus([[1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12]])),
    ]
    assert len({of(), *others}) == 1 + len(others)


def test_resized_goes_on_in_the_same_order(stream):
    dataset = GPTDataset(stream([41]), 4, seed=3)
    longer = dataset.resized(25)
    assert (len(dataset), len(longer)) == (10, 25)
    assert [longer.starts([k]).tolist() for k in range(10)] == [
        dataset.starts([k]).tolist() for k in range(10)
    ]
    assert longer.fingerprint == dataset.fingerprint
    with pytest.raises(ValueError, match="num_samples=0 must be at least 1"):
        dataset.resized(0)


def test_tokens_behind_a_url_are_the_same(stream):
    near = stream([3, 6, 1, 9, 4])
    far = IndexedDataset("file://" + near.prefix)
    assert not isinstance(far.tokens, np.ndarray)
    for split in (None, Split("some", np.array([0, 1, 4]))):
        expected, found = (
            GPTDataset(indexed, 4, seed=0, split=split, cross_document_loss=False).batch([2, 0])
            for indexed in (near, far)
        )
        assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_f_121_each_epoch_has_every_window_once_in_its_own_order(stream):
    indexed = stream([400])
    dataset = GPTDataset(indexed, 4, seed=7, num_samples=3 * 99)
    epochs = dataset.starts(np.arange(3 * 99)).reshape(3, 99)
    assert all(sorted(epoch.tolist()) == list(range(0, 396, 4)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
    again = GPTDataset(indexed, 4, seed=7)
    assert np.array_equal(again.starts(np.arange(99)), epochs[0])
    other = GPTDataset(indexed, 4, seed=8)
    assert not np.array_equal(other.starts(np.arange(99)), epochs[0])


def test_f_127_an_empty_split_is_refused_by_name(stream):
    indexed = stream([10] * 10)
    splits = split_documents(indexed.num_documents, "969,30,1")
    assert len(GPTDataset(indexed, 4, seed=0, split=splits["train"])) == 24
    with pytest.raises(ValueError, match=r"split 'valid' \(documents 10 to 10 of 10\) holds 0"):
        GPTDataset(indexed, 4, seed=0, split=splits["valid"])


def test_f_127_splits_share_no_token(stream):
    indexed = stream([3, 8, 0, 9, 5, 7, 11, 2])
    splits = split_documents(indexed.num_documents, "4,2,2")
    seen = [
        {t for sample in by_start(GPTDataset(indexed, 4, seed=0, split=split))
         for t in (*sample["tokens"].tolist(), *sample["labels"].tolist())}
        for split in splits.values()
    ]  # fmt: skip
    assert seen == [set(range(17)), set(range(20, 29)), set(range(32, 45))]


def test_a_batch_is_its_samples_laid_end_to_end(stream):
    dataset = GPTDataset(stream([3, 6, 1, 9, 0, 4]), 4, seed=3, num_samples=14)
    wanted = [13, 0, 5, 5, 2]
    batch = dataset.batch(wanted)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        rows = [dataset[k][name] for k in wanted]
        assert np.array_equal(batch[name], np.concatenate(rows)[None])
    bounds = [dataset[k]["cu_seqlens"] + 4 * row for row, k in enumerate(wanted)]
    assert batch["cu_seqlens"].tolist() == sorted({b for part in bounds for b in part.tolist()})
    assert batch["max_seqlen"] == max(np.diff(batch["cu_seqlens"]))
    assert type(batch["max_seqlen"]) is int
    assert batch["sample_ids"].tolist() == wanted
    assert batch["document_ids"].tolist() == [
        k * 4 + first for k in wanted for first in dataset[k]["cu_seqlens"][:-1].tolist()
    ]


def test_batches_share_no_memory(stream):
    dataset = GPTDataset(stream([40]), 4, seed=0)
    first = dataset.batch([0, 1])
    kept = {name: np.copy(value) for name, value in first.items()}
    second = dataset.batch([2, 3])
    for value in second.values():
        if isinstance(value, np.ndarray):
            value[...] = -1
    assert all(np.array_equal(first[name], kept[name]) for name in kept)


def test_pickles_small_and_equal(stream):
    dataset = GPTDataset(stream([100_000]), 10, seed=0)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 3000
    assert pickle.loads(pickled)[77]["tokens"].tolist() == dataset[77]["tokens"].tolist()


def test_samples_out_of_range_raise(stream):
    dataset = GPTDataset(stream([9]), 4, seed=0)
    for sample in (-1, 2):
        with pytest.raises(IndexError, match="of 2"):
            dataset[sample]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": "other"}, "order='other' must be 'native', 'megatron'"),
        ({"sequence_length": 0}, "sequence_length=0 must be at least 1"),
        ({"num_samples": 0}, "num_samples=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be between 0 and"),
        ({"split": split_documents(3, "1")["train"]}, r"must lie in 2 documents"),
        ({"split": Split("odd", range(0, 2, 2))}, "must leave out no document"),
    ],
)
def test_arguments_out_of_range_are_refused(stream, arguments, message):
    with pytest.raises(ValueError, match=message):
        GPTDataset(stream([9, 9]), **{"sequence_length": 4, "seed": 0, **arguments})


def test_tokens_must_be_integers(corpus):
    indexed = corpus([np.arange(9, dtype=np.float32)], np.float32)
    with pytest.raises(ValueError, match=r"indexed.dtype=float32 must be"):
        GPTDataset(indexed, 4, seed=0)


@pytest.mark.parametrize("end_token", ["</s>", 2.5, 1 << 40])
def test_an_end_token_is_an_id_of_the_dataset(corpus, end_token):
    with pytest.raises(ValueError, match="end_token="):
        GPTDataset(corpus([[1, 2, 3, 4, 5]]), 4, seed=0, end_token=end_token)
