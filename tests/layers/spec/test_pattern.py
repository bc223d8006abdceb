"""Patterns of hybrid models: what they say, and what they refuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.layers.spec.pattern import (
    BLOCKS,
    blocks_of,
    pattern_of_ratios,
    stages_of,
)

LETTERS = st.sampled_from(sorted(BLOCKS))


def test_a_block_is_a_letter_and_stages_are_bounded() -> None:
    assert blocks_of("M*-E|MG") == "M*-EMG"
    assert stages_of("M*-E|MG") == [range(4), range(4, 6)]
    assert stages_of("MM") == [range(2)]


@given(st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4))
def test_stages_cover_all_blocks_in_order(stages: list[str]) -> None:
    pattern = "|".join(stages)
    blocks = blocks_of(pattern)
    assert ["".join(blocks[n] for n in stage) for stage in stages_of(pattern)] == stages


@pytest.mark.parametrize("pattern", ["", "|M", "M|", "M||M", "MXM", "m"])
def test_what_is_no_pattern_is_named(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern="):
        blocks_of(pattern)


def test_kinds_are_spread_evenly() -> None:
    assert pattern_of_ratios(8, {"*": 0.25}) == "MM*MMM*M"
    assert pattern_of_ratios(8, {"*": 0.125, "-": 0.5}) == "-M-M*-M-"
    assert pattern_of_ratios(3, {}, rest="*") == "***"


@given(st.integers(1, 60), st.floats(0, 0.5), st.floats(0, 0.5))
def test_every_kind_has_its_share(layers: int, attention: float, mlp: float) -> None:
    wanted = round(attention * layers), round(mlp * layers)
    if sum(wanted) > layers:  # two shares of a half, rounded up
        return
    pattern = pattern_of_ratios(layers, {"*": attention, "-": mlp})
    assert (pattern.count("*"), pattern.count("-")) == wanted
    places = [place for place, letter in enumerate(pattern) if letter == "*"]
    gaps = {b - a for a, b in zip(places, places[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_layers": 0, "ratios": {}},
        {"num_layers": 4, "ratios": {"X": 0.5}},
        {"num_layers": 4, "ratios": {"*": 1.5}},
        {"num_layers": 4, "ratios": {"*": -0.1}},
        {"num_layers": 4, "ratios": {"*": 0.75, "-": 0.75}},
        {"num_layers": 4, "ratios": {}, "rest": "?"},
    ],
)
def test_wrong_ratios_are_named(arguments: dict) -> None:
    with pytest.raises(ValueError, match="num_layers=|ratios="):
        pattern_of_ratios(**arguments)
