"""The native sample index equals its NumPy twin, a plain walk, and Megatron-LM's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import sample_index
from megablocks_core.data.sample_index import build, build_numpy, count_samples
from tests.data.plain_index import plain_index

BOTH = pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])


def all_ways(lengths, document_index, length, **options):
    """Build natively, on threads, and in NumPy; they must agree."""
    arrays = np.array(lengths, np.int32), np.array(document_index, np.int32)
    options["num_tokens"] = sum(lengths[d] for d in document_index)
    index = build(*arrays, length, **options)
    twin = build_numpy(*arrays, length, **options)
    assert index.dtype == twin.dtype == np.int32
    assert index.tolist() == twin.tolist()
    wide = build(arrays[0], arrays[1].astype(np.int64), length, **options)
    assert wide.tolist() == twin.tolist()
    return index.tolist()


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    order=st.lists(st.integers(0, 7), max_size=20),
    length=st.integers(1, 12),
    extra_token=st.booleans(),
    drop_last=st.booleans(),
)
def test_equals_a_plain_walk(lengths, order, length, extra_token, drop_last):
    documents = [d % len(lengths) for d in order]
    options = {"extra_token": extra_token, "drop_last": drop_last}
    plain = plain_index(lengths, documents, length, **options)
    assert all_ways(lengths, documents, length, **options) == plain
    tokens = sum(lengths[d] for d in documents)
    assert len(plain) - 1 == count_samples(tokens, length, **options)


@pytest.mark.parametrize("extra_token", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("threads", [2, 3])
def test_every_thread_writes_its_own_rows(extra_token, drop_last, threads):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 30, 1000).astype(np.int32)
    documents = rng.integers(0, 1000, 1_700_000).astype(np.int32)
    options = {
        "num_tokens": int(lengths[documents].sum(dtype=np.int64)),
        "extra_token": extra_token,
        "drop_last": drop_last,
    }
    shared = build(lengths, documents, 17, threads=threads, **options)
    assert np.array_equal(shared, build_numpy(lengths, documents, 17, **options))


@pytest.mark.parametrize(
    ("lengths", "epochs", "extra", "without"),
    [
        ([4, 4], 1, 1, 2),
        ([5], 1, 1, 1),
        ([4], 1, 0, 1),
        ([3], 1, 0, 0),
        ([3, 0, 5], 1, 1, 2),
        ([4, 4], 2, 3, 4),
        ([2, 3, 4], 3, 6, 6),
    ],
)
def test_f_117_number_of_samples(lengths, epochs, extra, without):
    documents = list(range(len(lengths))) * epochs
    assert len(all_ways(lengths, documents, 4)) - 1 == extra
    assert len(all_ways(lengths, documents, 4, extra_token=False)) - 1 == without


def test_f_115_and_f_116_samples_share_a_token_and_begin_inside_documents():
    assert all_ways([3, 6], [0, 1], 4) == [[0, 0], [1, 1], [1, 5]]


def test_a_last_short_sample_is_counted_exactly():
    """Single precision, as the reference divides, counts 4,096 of these."""
    assert count_samples(16_777_218, 4096, drop_last=False) == 4097
    assert len(all_ways([16_777_218], [0], 4096, drop_last=False)) == 4098
    assert count_samples(2**62 + 2, 2**20, drop_last=False) == 2**42 + 1


def test_rows_do_not_point_at_empty_documents_behind_the_end():
    assert all_ways([3, 0], [0, 1, 1], 5, drop_last=False) == [[0, 0], [0, 2]]
    assert all_ways([0, 3], [0, 0, 1], 2) == [[0, 0], [2, 2]]


def test_int64_where_int32_is_too_small(monkeypatch):
    monkeypatch.setattr(sample_index, "LARGEST", 6)
    arrays = np.array([2, 3], np.int32), np.array([0, 1] * 4, np.int32)
    index = build(*arrays, 4, num_tokens=20)
    assert index.dtype == np.int64
    assert index.tolist() == build_numpy(*arrays, 4, num_tokens=20).tolist()


GOOD = {
    "lengths": np.array([3, 6], np.int32),
    "document_index": np.array([0, 1], np.int32),
    "sequence_length": 4,
    "num_tokens": 9,
    "threads": 1,
}


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": np.array([3, 6])}, "lengths.dtype=int64 must be int32"),
        ({"lengths": np.array([[3, 6]], np.int32)}, "lengths of shape .* must be one contiguous"),
        ({"lengths": np.array([3, -6], np.int32)}, r"lengths\[1\]=-6 must be 0 or more"),
        ({"document_index": np.array([0.0])}, "document_index.dtype=float64 must be int32 or"),
        ({"document_index": np.array([0, 2])}, r"document_index\[1\]=2 must be one of 2"),
        ({"document_index": np.array([-1, 1])}, r"document_index\[0\]=-1 must be one of 2"),
        ({"document_index": np.arange(4, dtype=np.int32)[::2]}, "must be one contiguous"),
        ({"sequence_length": 0}, "sequence_length=0 must be between 1 and"),
        ({"sequence_length": 2**31}, "sequence_length=2147483648 must be between 1 and"),
        ({"num_tokens": 8}, "num_tokens=8 must be the 9 tokens"),
        ({"num_tokens": 10}, "num_tokens=10 must be the 9 tokens"),
        ({"num_tokens": -1}, "num_tokens=-1 must be the 9 tokens"),
        ({"threads": 0}, "threads=0 must be at least 1"),
    ],
)
def test_bad_input_is_named(monkeypatch, native, change, message):
    if not native:
        monkeypatch.setattr(sample_index, "_native", None)
    with pytest.raises(ValueError, match=message):
        build(**{**GOOD, **change})


def test_a_thousand_random_corpora_have_megatrons_sample_index():
    """The reference's helper; it stops the process where an epoch has fewer than two tokens.

    A short last sample before empty documents makes it fail an assertion, and is left out.
    """
    helpers = pytest.importorskip("megatron.core.datasets.helpers", reason="oracle megatron")
    for case in range(1000):
        rng = np.random.default_rng(case)
        lengths = rng.integers(0, rng.choice([2, 5, 40]), rng.integers(2, 40)).astype(np.int32)
        lengths[rng.integers(len(lengths))] += 2
        epochs, length = int(rng.integers(1, 4)), int(rng.integers(2, 20))
        documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
        rng.shuffle(documents)
        for extra_token in (True, False):
            for drop_last in (True, False):
                if not drop_last and extra_token and lengths[documents[-1]] == 0:
                    continue
                tokens = int(lengths.sum())
                theirs = helpers.build_sample_idx(
                    lengths, documents, length, epochs, tokens, drop_last, extra_token
                )
                options = {"extra_token": extra_token, "drop_last": drop_last}
                ours = build(lengths, documents, length, num_tokens=epochs * tokens, **options)
                twin = build_numpy(
                    lengths, documents, length, num_tokens=epochs * tokens, **options
                )
                assert ours.dtype == twin.dtype == theirs.dtype
                assert np.array_equal(ours, theirs)
                assert np.array_equal(twin, theirs)
