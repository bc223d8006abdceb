"""Bits of a counter are those of splitmix64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.parallel.counter import as_word, bits_of, key_of, signed

_WORD = (1 << 64) - 1
_WORDS = st.integers(-(2**63), 2**63 - 1)


def _mixed(key, index):
    """The published step, in Python's integers."""
    word = (key + (index + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


@given(key=_WORDS, index=_WORDS)
def test_bits_are_those_of_the_published_step(key, index):
    expected = signed(_mixed(key, index))
    word = torch.tensor([key])
    assert bits_of(word, index).item() == expected
    assert bits_of(word, torch.tensor([index])).item() == expected
    assert word.item() == key


def test_known_bits_stay():
    # A change here changes every model and every dropout mask that a seed stands for.
    assert key_of(1234, "weight") == 7585663819074190007
    assert signed(2**64 - 1) == -1
    assert bits_of(torch.tensor(0), 0).item() == signed(0xE220A8397B1DCDAF)


def test_keys_and_indices_broadcast():
    bits = bits_of(torch.tensor([[3], [4]]), torch.tensor([0, 1, 2]))
    assert bits.shape == (2, 3)
    assert bits[1, 2].item() == signed(_mixed(4, 2))


@pytest.mark.parametrize("number", [5, torch.tensor(5, dtype=torch.int32)])
def test_numbers_become_words(number):
    word = as_word(number, torch.device("cpu"))
    assert word.dtype == torch.int64 and word.item() == 5
