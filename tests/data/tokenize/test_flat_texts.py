"""Texts in one block are the list of them."""

import numpy as np
import pytest

from megablocks_core.data.tokenize.flat_texts import FlatTexts, LinePlaces, utf8_sizes

from .conftest import some_texts

TEXTS = ["", "a", "", "数据", "b c", ""]


def flat(texts):
    contents = [text.encode() for text in texts]
    ends = np.cumsum([len(one) + 1 for one in contents]) - 1
    return FlatTexts(b"".join(one + b"\0" for one in contents), np.asarray(ends, np.int64))


@pytest.mark.parametrize("texts", [[], [""], ["a"], TEXTS, some_texts(50)])
def test_it_is_the_list_and_so_is_each_of_its_parts(texts):
    for start in range(len(texts) + 1):
        for stop in range(start, len(texts) + 1):
            part, whole = texts[start:stop], flat(texts)[start:stop]
            assert list(whole) == part
            assert [whole[at] for at in range(len(part))] == part
            assert [whole[-at] for at in range(1, len(part) + 1)] == part[::-1]
            assert whole.contents() == [text.encode() for text in part]
            assert whole.joined() == "\0".join(part).encode()
            assert utf8_sizes(whole).tolist() == [len(text.encode()) for text in part]
            assert utf8_sizes(part).tolist() == utf8_sizes(whole).tolist()
            assert list(whole[1:-1]) == part[1:-1]


def test_what_is_not_there():
    with pytest.raises(IndexError):
        flat(TEXTS)[len(TEXTS)]
    with pytest.raises(ValueError, match="step=2 must be 1"):
        flat(TEXTS)[::2]


def test_places():
    places = LinePlaces(3, np.array([2, 5, 6]))
    assert list(places) == [(3, 2), (3, 5), (3, 6)]
    assert list(places[1:]) == [(3, 5), (3, 6)]
    assert len(places) == 3
