"""Sources that do not go together are refused when a blend of them is built."""

import numpy as np
import pytest

from megablocks_core.data import BlendedDataset, GPTDataset, IndexedDataset, IndexedDatasetBuilder
from megablocks_core.data.sources import checked_sources, epoch_of, tokenizers_of


@pytest.fixture
def source(tmp_path):
    """Return a function that makes a dataset of nine samples."""

    def make(seed, length=4, tokenizer=None):
        prefix = tmp_path / f"{seed}-{length}-{tokenizer}"
        with IndexedDatasetBuilder(prefix, np.int32, tokenizer=tokenizer) as builder:
            builder.add_document(range(9 * length + 1))
        return GPTDataset(IndexedDataset(prefix), length, seed=seed, num_samples=12)

    return make


def test_an_epoch_is_what_comes_before_a_source_repeats_itself(source):
    assert (len(source(1)), epoch_of(source(2))) == (12, 9)


def test_equal_shuffles_are_refused(source):
    twins = {"a": source(1), "b": source(1, tokenizer="words")}
    with pytest.raises(ValueError, match="'a' and 'b', both with seed=1 and 9 samples"):
        checked_sources(twins)
    assert list(checked_sources({"a": twins["a"], "b": source(2)})) == ["a", "b"]


def test_sources_are_of_one_length(source):
    with pytest.raises(ValueError, match="sequence_length={'a': 4, 'b': 8} must all be of one"):
        checked_sources({"a": source(1), "b": source(2, 8)})
    with pytest.raises(ValueError, match="must name at least one"):
        checked_sources({})


def test_sources_are_of_one_tokenizer_where_it_is_known(source):
    one = {"a": source(1, tokenizer="words"), "b": source(2)}
    blend = BlendedDataset(one, seed=1)
    assert (tokenizers_of(one), blend.tokenizer) == ({"a": "words"}, "words")
    assert BlendedDataset({"b": one["b"]}, seed=1).tokenizer is None
    nested = {"blend": blend, "c": source(3, tokenizer="bytes")}
    with pytest.raises(ValueError, match="tokenizers={'blend': 'words', 'c': 'bytes'} must all"):
        BlendedDataset(nested, seed=1)
