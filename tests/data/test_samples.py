"""Numbered samples: their count, one of them, and what is asked for that is not there."""

import numpy as np
import pytest

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder
from megablocks_core.data.samples import IndexedSamples
from megablocks_core.data.split import Split


class Documents(IndexedSamples):
    """A sample is a document."""

    def __init__(self, indexed, **options):
        super().__init__(indexed, **{"seed": 0, "split": None, **options})
        self._length = len(self.split.documents)

    def batch(self, samples):
        ids = self._checked(samples)
        lengths = np.asarray(self.indexed.sequence_lengths)[ids].astype(np.int64)
        starts = (np.cumsum(self.indexed.sequence_lengths) - self.indexed.sequence_lengths)[ids]
        tokens = self._read(starts.astype(np.int64), lengths)
        rows = {"tokens": tokens, "labels": tokens, "loss_mask": tokens, "position_ids": tokens}
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        return {name: row[None] for name, row in rows.items()} | {"cu_seqlens": bounds}


@pytest.fixture
def indexed(tmp_path):
    builder = IndexedDatasetBuilder(tmp_path / "tokens", dtype=np.uint16, tokenizer="bytes")
    for number in range(4):
        builder.add_document(np.arange(number, 2 * number + 1), [number + 1])
    builder.finish()
    return IndexedDataset(tmp_path / "tokens")


def test_a_sample_is_the_batch_of_one(indexed):
    samples = Documents(indexed)
    assert len(samples) == 4 and samples.tokenizer == "bytes"
    one = samples[2]
    assert one["tokens"].tolist() == [2, 3, 4] and one["cu_seqlens"].tolist() == [0, 3]
    assert set(one) == {"tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"}
    assert samples.batch([3, 0])["tokens"].tolist() == [[3, 4, 5, 6, 0]]


@pytest.mark.parametrize("wanted", [[4], [-1], [0, 7]])
def test_samples_that_are_not_there(indexed, wanted):
    with pytest.raises(IndexError, match=f"samples {min(wanted)} to {max(wanted)} of 4"):
        Documents(indexed).batch(wanted)


def test_as_many_as_are_asked_for(indexed):
    samples = Documents(indexed)
    assert (len(samples.resized(9)), len(samples)) == (9, 4)
    with pytest.raises(ValueError, match="num_samples=0 must be at least 1"):
        samples.resized(0)


def test_tokens_are_read_into_what_is_given(indexed):
    samples, out = Documents(indexed), np.zeros(2, np.int64)
    assert samples._read(np.array([0, 3]), np.array([1, 1]), out=out) is out
    assert out.tolist() == [0, 2]


def test_splits_count_documents_or_groups_of_them(indexed):
    assert Documents(indexed).split == Split("all", range(4))
    assert Documents(indexed, of=2).split == Split("all", range(2))
    assert len(Documents(indexed, split=Split("some", range(1, 3)))) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"indexed": "tokens"}, "indexed='tokens' must be an IndexedDataset"),
        ({"seed": -1}, "seed=-1 must be between 0"),
        ({"split": "9,1"}, "split='9,1' must be a Split"),
    ],
)
def test_wrong_arguments_are_named(indexed, options, message):
    with pytest.raises(ValueError, match=message):
        Documents(**{"indexed": indexed, **options})


def test_tokens_must_be_integers(tmp_path):
    builder = IndexedDatasetBuilder(tmp_path / "floats", dtype=np.float32)
    builder.add_document(np.ones(2, np.float32), [2])
    builder.finish()
    with pytest.raises(ValueError, match="indexed.dtype=float32 must be an integer type"):
        Documents(IndexedDataset(tmp_path / "floats"))
