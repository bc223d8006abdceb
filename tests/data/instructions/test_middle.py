"""What is rearranged comes back, and is drawn by the number of its sample alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data.instructions import FillInTheMiddle

PRE, MID, SUF = 1000, 1001, 1002
ALWAYS = FillInTheMiddle(PRE, MID, SUF, rate=1.0)


@given(
    ids=st.lists(st.integers(0, 999), max_size=20),
    sample=st.integers(0, 2**40),
    part=st.integers(0, 9),
    rate=st.sampled_from([0.0, 0.5, 1.0]),
    spm=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_document_comes_back(ids, sample, part, rate, spm):
    middle = FillInTheMiddle(PRE, MID, SUF, rate=rate, spm_rate=spm, seed=3)
    found = middle.tokens(ids, sample, part)
    assert middle.undo(found).tolist() == ids
    moved = bool(middle.applies(np.array([sample]), np.array([part]))[0])
    assert len(found) == len(ids) + 3 * moved
    assert rate == 0.5 or moved == bool(rate)
    if moved:
        assert [t for t in found.tolist() if t >= 1000] == [PRE, SUF, MID]
        if spm == 1.0:
            assert found[:2].tolist() == [PRE, SUF]


def test_the_two_forms():
    ids = list(range(10, 20))
    psm = FillInTheMiddle(PRE, MID, SUF, rate=1.0, spm_rate=0.0).tokens(ids, 7).tolist()
    spm = FillInTheMiddle(PRE, MID, SUF, rate=1.0, spm_rate=1.0).tokens(ids, 7).tolist()
    before, rest = psm[1 : psm.index(SUF)], psm[psm.index(SUF) + 1 :]
    after, centre = rest[: rest.index(MID)], rest[rest.index(MID) + 1 :]
    assert before + centre + after == ids
    assert spm == [PRE, SUF, *after, MID, *before, *centre]


def test_cuts_and_forms_are_drawn_evenly():
    counts, share, spm = np.zeros(5), 0, 0
    middle = FillInTheMiddle(PRE, MID, SUF, rate=0.5, spm_rate=0.25, seed=1)
    for sample in range(4000):
        found = middle.tokens([1, 2, 3, 4], sample).tolist()
        if PRE not in found:
            continue
        share += 1
        after = found[found.index(SUF) + 1 : found.index(MID)]
        counts[len(after)] += 1  # the later cut leaves so many behind it
        spm += found[:2] == [PRE, SUF] and found[-4:] != [1, 2, 3, 4]
    assert abs(share / 4000 - 0.5) < 0.03
    # Of two places among five, the later one leaves 0 to 4 behind it in 9, 7, 5, 3 and 1 of 25.
    assert np.allclose(counts / share, np.array([9, 7, 5, 3, 1]) / 25, atol=0.03)
    assert 0.25 < spm / share < 0.6  # SPM, or an empty prefix


def test_another_seed_sample_or_part_is_another_draw():
    ids = list(range(50))
    found = {
        str(FillInTheMiddle(PRE, MID, SUF, rate=1.0, seed=seed).tokens(ids, sample, part).tolist())
        for seed in range(3)
        for sample in range(4)
        for part in range(4)
    }
    assert len(found) > 44


def test_text_is_cut_between_characters_and_its_parts_encoded_one_by_one():
    def encode(text):
        return list(text.encode())

    for sample in range(50):
        text = "naïve 数据 \U0001f600"
        found = ALWAYS.text(text, encode, sample)
        assert bytes(ALWAYS.undo(found).tolist()).decode() == text
        marks = [at for at, token in enumerate(found.tolist()) if token >= 1000]
        for start, stop in zip([*marks], [*marks[1:], len(found)], strict=True):
            bytes(found[start + 1 : stop].tolist()).decode()  # no character is cut
    never = FillInTheMiddle(PRE, MID, SUF, rate=0.0)
    assert never.text("ab", encode, 0).tolist() == [97, 98]


def test_what_was_not_made_by_it_is_refused():
    for ids in ([PRE, 1, MID, 2, SUF], [1, PRE, SUF, MID], [PRE, SUF, MID, PRE]):
        with pytest.raises(ValueError, match="must begin with 1000"):
            ALWAYS.undo(ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"middle": PRE}, "must be three different ids"),
        ({"suffix": -1}, "suffix=-1 must be at least 0"),
        ({"rate": 1.5}, "rate=1.5 must be between 0 and 1"),
        ({"spm_rate": -0.5}, "spm_rate=-0.5 must be"),
        ({"seed": -1}, "seed=-1 must be"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        FillInTheMiddle(**{"prefix": PRE, "middle": MID, "suffix": SUF, **options})
