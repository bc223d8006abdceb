"""The order "megatron" has the reference's indices and items, for any seed, split and epochs."""

import itertools
import pickle
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import (
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    MegatronOrder,
    SequenceSplit,
    Split,
    sample_index,
    split_documents,
    split_sequences,
)
from megablocks_core.data.megatron_order import MegatronIndex
from tests.data.megatron import megatron_dataset
from tests.data.plain_index import plain_index

ORDERS = [MegatronOrder(extra_token=e, drop_last=d) for e in (True, False) for d in (True, False)]


def plain_indices(lengths, length, *, seed, num_samples, order):
    """Write the three indices down as the reference states them."""
    extra, tokens, epochs = int(order.extra_token), sum(lengths), 1
    while num_samples is not None and epochs * tokens < num_samples * length + extra:
        epochs += 1
    before = ((epochs - 1) * tokens - extra) // length
    apart = epochs > 1 and num_samples - before < int(0.80 * ((tokens - extra) // length))
    state = np.random.RandomState(seed)

    def shuffled(numbers):
        numbers = np.array(numbers, np.int32)
        state.shuffle(numbers)
        return numbers.tolist()

    one = list(range(len(lengths)))
    documents = shuffled(one * (epochs - 1)) + shuffled(one) if apart else shuffled(one * epochs)
    options = {"extra_token": order.extra_token, "drop_last": order.drop_last}
    samples = plain_index(lengths, documents, length, **options)
    runs = itertools.pairwise([0, before, len(samples) - 1] if apart else [0, len(samples) - 1])
    shuffle = [k for first, last in runs for k in shuffled(range(first, last))]
    return documents, samples, shuffle


def index_of(dataset: GPTDataset) -> MegatronIndex:
    assert isinstance(dataset._order, MegatronIndex)
    return dataset._order


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda x: sum(x) > 1),
    length=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
    num_samples=st.one_of(st.none(), st.integers(1, 60)),
    order=st.sampled_from(ORDERS),
)
def test_indices_equal_those_written_by_hand(
    tmp_path_factory, lengths, length, seed, num_samples, order
):
    if num_samples is None:
        length = min(length, sum(lengths) - 1)
    options = {"seed": seed, "num_samples": num_samples, "order": order}
    with IndexedDatasetBuilder(tmp_path_factory.mktemp("d") / "a", dtype=np.int32) as builder:
        for count in lengths:
            builder.add_document(np.arange(count))
    split = Split("all", range(len(lengths)))
    index = MegatronIndex(IndexedDataset(builder.prefix), length, split=split, **options)
    documents, samples, shuffle = plain_indices(lengths, length, **options)
    assert index.document_index.tolist() == documents
    assert index.sample_index.tolist() == samples
    assert index.shuffle_index.tolist() == shuffle
    types = [each.dtype for each in (index.document_index, index.sample_index, index.shuffle_index)]
    assert types == [np.int32, np.int32, np.uint32]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("numpy", [False, True], ids=["native", "numpy"])
def test_items_are_the_tokens_of_the_stream(stream, monkeypatch, order, numpy):
    if numpy:
        monkeypatch.setattr(sample_index, "_native", None)
    lengths = [3, 0, 6, 1, 9, 0, 4]
    begins = [0, *itertools.accumulate(lengths)]
    dataset = GPTDataset(stream(lengths), 4, seed=5, order=order, num_samples=11)
    documents, samples, shuffle = plain_indices(lengths, 4, seed=5, num_samples=11, order=order)
    flat = [token for d in documents for token in range(begins[d], begins[d] + lengths[d])]
    owner = [place for place, d in enumerate(documents) for _ in range(lengths[d])]
    assert len(dataset) == 11 <= len(shuffle)
    for k in range(11):
        first = shuffle[k] * 4
        tokens = flat[first : first + 4 + order.extra_token]
        item = dataset[k]
        assert item["tokens"].tolist() == (tokens + [0] * 4)[:4]
        labels = tokens[1:]
        assert item["labels"].tolist() == (labels + [0] * 4)[:4]
        assert item["loss_mask"].tolist() == [1] * len(labels) + [0] * (4 - len(labels))
        inside = owner[first : first + min(len(tokens), 4)]
        changes = [i for i in range(1, len(inside)) if inside[i] != inside[i - 1]]
        assert item["cu_seqlens"].tolist() == [0, *changes, 4]
        place = dataset.locate(k)
        assert [begins[d] + i for d, a, b in place.documents for i in range(a, b)] == tokens[:4]


def test_f_115_and_f_117_in_the_order_of_the_reference(stream):
    """Counts join the end of one epoch to the start of the next, as the case says."""
    for lengths, epochs, count in (([4, 4], 2, 3), ([2, 3, 4], 3, 6), ([3, 6], 1, 2)):
        index = MegatronIndex(
            stream(lengths), 4, seed=0, split=Split("all", range(len(lengths))), num_samples=count
        )
        assert (index.num_epochs, index.num_samples) == (epochs, count)
    item = GPTDataset(stream([9]), 4, seed=0, order="megatron")[0]
    assert item["labels"].tolist() == (item["tokens"] + 1).tolist()


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([4], {}, "split 'all' of 1 sequences holds 4 tokens, must hold at least 5"),
        ([3, 0], {}, "holds 3 tokens, must hold at least 5 for a sample of sequence_length=4"),
        ([0, 0], {"num_samples": 3}, "split 'all' of 2 sequences holds 0 tokens, must hold"),
        ([0, 1], {"num_samples": 3}, "split 'all' of 2 sequences holds 1 tokens, must hold"),
        ([], {"num_samples": 3}, "split 'all' of 0 sequences holds 0 tokens"),
        ([1], {"order": MegatronOrder(drop_last=False)}, "must hold at least 2 for a sample"),
        ([3], {"order": MegatronOrder(extra_token=False)}, "must hold at least 4 for a sample"),
    ],
)
def test_f_117_too_few_tokens_are_an_error_not_an_endless_loop(stream, lengths, options, message):
    with pytest.raises(ValueError, match=message):
        GPTDataset(stream(lengths), 4, **{"seed": 0, "order": "megatron", **options})


def test_f_121_documents_are_shuffled_over_all_epochs_but_a_last_short_one(stream):
    """Confirmed: all epochs are one shuffle, as in the reference, unless little of the last is
    drawn; then the earlier epochs have every document as often, and so has the last."""
    indexed = stream([10] * 40)
    split = Split("all", range(40))
    together = MegatronIndex(indexed, 4, seed=3, split=split, num_samples=198)
    assert np.bincount(together.document_index).tolist() == [2] * 40
    assert sorted(together.document_index[:40].tolist()) != list(range(40))
    assert not together.shuffled_apart

    apart = MegatronIndex(indexed, 4, seed=3, split=split, num_samples=150)
    assert apart.shuffled_apart
    for epoch in (apart.document_index[:40], apart.document_index[40:]):
        assert sorted(epoch.tolist()) == list(range(40))
    assert sorted(apart.shuffle_index[:99].tolist()) == list(range(99))
    again = MegatronIndex(indexed, 4, seed=3, split=split, num_samples=150)
    assert np.array_equal(again.shuffle_index, apart.shuffle_index)


def test_a_part_of_the_sequences_is_a_corpus_of_its_own(corpus):
    documents = [list(range(10 * d, 10 * d + 1 + d % 5)) for d in range(30)]
    part = corpus(documents[7:19])
    chosen = Split("valid", np.arange(7, 19))
    whole = corpus(documents)
    options = {"seed": 9, "order": "megatron", "num_samples": 25}
    alone = GPTDataset(part, 4, **options).batch(range(25))
    for split in (Split("valid", range(7, 19)), SequenceSplit("valid", range(7, 19)), chosen):
        dataset = GPTDataset(whole, 4, split=split, **options)
        assert np.array_equal(dataset.batch(range(25))["tokens"], alone["tokens"])
        assert index_of(dataset).document_index.min() == 7
        place = dataset.locate(3)
        tokens = [documents[d][i] for d, a, b in place.documents for i in range(a, b)]
        assert (place.source, tokens) == ("valid", dataset[3]["tokens"].tolist())


def test_sequences_are_what_is_shuffled_and_cut(tmp_path):
    """Documents of two sequences: the reference knows only sequences, places name documents."""
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32) as builder:
        for d in range(10):
            builder.add_document(np.arange(8 * d, 8 * d + 8), [3, 5])
    indexed = IndexedDataset(tmp_path / "a")
    split = split_sequences(len(indexed), "65,35")["train"]
    assert split == SequenceSplit("train", range(13))
    dataset = GPTDataset(indexed, 4, seed=1, order="megatron", split=split)
    assert sorted(index_of(dataset).document_index.tolist()) == list(range(13))
    for k in range(len(dataset)):
        documents = dataset.locate(k).documents
        tokens = [8 * d + i for d, a, b in documents for i in range(a, b)]
        assert tokens == dataset[k]["tokens"].tolist()
    by_document = GPTDataset(
        indexed, 4, seed=1, order="megatron", split=split_documents(10, "65,35")["train"]
    )
    assert sorted(index_of(by_document).document_index.tolist()) == list(range(12))
    with pytest.raises(ValueError, match="split 'train' of sequences needs order='megatron'"):
        GPTDataset(indexed, 4, seed=1, split=split)


def test_the_fingerprint_tells_orders_apart_and_pickles_are_small(stream):
    indexed = stream([1000] * 9)
    datasets = [
        GPTDataset(indexed, 8, seed=1, order=order, num_samples=count)
        for order, count in (
            ("native", 500),
            ("megatron", 500),
            ("megatron", 5000),
            ("megatron", 5600),
            (ORDERS[1], 500),
            (ORDERS[2], 500),
        )
    ]
    assert len({dataset.fingerprint for dataset in datasets}) == len(datasets)
    same = GPTDataset(indexed, 8, seed=1, order="megatron", num_samples=501)
    assert same.fingerprint == datasets[1].fingerprint
    pickled = pickle.dumps(datasets[2])
    assert len(pickled) < 3000
    again = pickle.loads(pickled)
    assert np.array_equal(again[4999]["tokens"], datasets[2][4999]["tokens"])


def test_more_samples_need_another_order(stream):
    dataset = GPTDataset(stream([9, 9]), 4, seed=0, order="megatron", num_samples=3)
    assert len(dataset.resized(4)) == 4
    with pytest.raises(ValueError, match="num_samples=5 must be at most 4"):
        dataset.resized(5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2**32}, "seed=4294967296 must be between 0 and"),
        ({"seed": -1}, "seed=-1 must be between 0 and"),
        ({"split": Split("far", range(3))}, "must lie in 2 documents"),
        ({"split": Split("odd", range(0, 2, 2))}, "must leave out no document"),
        ({"split": Split("far", np.array([0, 2]))}, "split 'far' must lie in 2"),
        ({"split": SequenceSplit("far", np.array([-1]))}, "split 'far' must lie in 2"),
        ({"split": Split("twice", np.array([1, 1]))}, "split 'twice': .* in increasing order"),
        ({"split": Split("list", cast(Any, [0, 1]))}, "split 'list': documents must be one row"),
        ({"num_samples": 2**61}, "num_samples=2305843009213693952 must be of at most"),
    ],
)
def test_arguments_out_of_range_are_refused(stream, change, message):
    with pytest.raises(ValueError, match=message):
        GPTDataset(stream([9, 9]), 4, **{"seed": 0, "order": "megatron", **change})


def test_a_thousand_random_corpora_have_megatrons_indices_and_items(tmp_path):
    """The reference's GPTDataset; where it fails (short last samples, no tokens) it is left out."""
    pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="oracle megatron")
    apart = 0
    for case in range(1000):
        rng = np.random.default_rng(case)
        lengths = rng.integers(0, rng.choice([2, 6, 30]), rng.integers(4, 40))
        lengths[rng.integers(len(lengths), size=2)] += 3
        prefix = tmp_path / str(case)
        with IndexedDatasetBuilder(prefix, dtype=rng.choice(["uint16", "int32"])) as builder:
            for count in lengths:
                builder.add_document(rng.integers(0, 50_000, count))
        indexed = IndexedDataset(prefix)
        splits = [
            s
            for s in split_sequences(len(lengths), "70,30").values()
            if lengths[s.documents].sum() > 1
        ]
        for split in splits:
            order, length = ORDERS[case % 4], int(rng.integers(2, 9))
            tokens = int(lengths[split.documents].sum())
            count = int(rng.integers(1, 3 + 4 * tokens // length))
            options = {"seed": case, "num_samples": count}
            ours = GPTDataset(indexed, length, split=split, order=order, **options)
            index = index_of(ours)
            try:
                theirs = megatron_dataset(
                    prefix,
                    length,
                    sequences=split.documents,
                    extra_token=order.extra_token,
                    drop_last=order.drop_last,
                    **options,
                )
            except AssertionError:
                assert not order.drop_last
                continue
            apart += index.shuffled_apart
            for name in ("document_index", "sample_index", "shuffle_index"):
                ours_too, reference = getattr(index, name), getattr(theirs, name)
                assert ours_too.dtype == reference.dtype
                assert np.array_equal(ours_too, reference)
            for k in rng.integers(0, count, 5).tolist():
                theirs.masks_and_position_ids_are_cached = False  # it masks the one it keeps
                item, reference = ours[k], theirs[k]
                for name in ("tokens", "labels", "loss_mask"):
                    assert np.array_equal(item[name], reference[name].numpy())
    assert apart > 50
