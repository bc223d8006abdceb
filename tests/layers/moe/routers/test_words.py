"""Values are uniform, and depend on word, key and place alone."""

import pytest
import torch

from megablocks_core.layers.moe.routers.words import check_words, stream_key, uniform


def test_values_are_uniform_and_of_word_key_and_place():
    words = torch.arange(2000)
    values = uniform(words, stream_key("a"), 50)
    assert values.dtype == torch.float64 and values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 5e-3 and abs(values.var() - 1 / 12) < 2e-3
    assert torch.equal(uniform(words[5:7], stream_key("a"), 20), values[5:7, :20])
    assert not torch.equal(uniform(words, stream_key("b"), 50), values)


def test_wrong_words_and_streams_are_refused():
    with pytest.raises(ValueError, match="stream='' must name"):
        stream_key("")
    with pytest.raises(ValueError, match="stream=3 must name"):
        stream_key(3)  # pyright: ignore
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(2), torch.zeros(2, 1).long()):
        with pytest.raises(ValueError, match=r"must be int64 of \[2\]"):
            check_words(wrong, 2)
