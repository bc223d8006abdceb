"""One rule for patterns of names."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.groups.patterns import chosen, matcher

NAMES = ("", "head", "head.weight", "layers.0", "layers.10.mlp", "layers.10.mlp.up.weight")


@pytest.mark.parametrize(
    ("pattern", "right"),
    [
        ("", [""]),
        ("head", ["head"]),
        ("*", ["", "head"]),
        ("**", list(NAMES)),
        ("layers.*", ["layers.0"]),
        ("layers.*.mlp", ["layers.10.mlp"]),
        ("layers.**", ["layers.0", "layers.10.mlp", "layers.10.mlp.up.weight"]),
        ("**.weight", ["head.weight", "layers.10.mlp.up.weight"]),
        ("h*d", ["head"]),
        ("layers.?", ["layers.0"]),
        ("layers.[0-9]*.mlp", ["layers.10.mlp"]),
        ("layers.[!0]", []),
        ("head[", []),
        ("HEAD", []),
        ("layers.0+", []),
    ],
)
def test_a_pattern_matches_whole_names(pattern, right):
    assert [name for name in NAMES if matcher(pattern)(name)] == right


@pytest.mark.parametrize(
    ("pattern", "right"),
    [
        ("", [""]),
        ("mlp", ["layers.10.mlp"]),
        ("*.mlp", ["layers.10.mlp"]),
        ("lp", []),
        ("weight", ["head.weight", "layers.10.mlp.up.weight"]),
    ],
)
def test_the_last_steps_may_be_enough(pattern, right):
    assert chosen(NAMES, pattern, ends=True).names == right


def test_names_come_in_their_order_and_patterns_without_a_name_are_told():
    found = chosen(NAMES, ["layers.0", "nothing", "head", "head.*"])
    assert found.names == ["head", "head.weight", "layers.0"]
    assert found.unmatched == ["nothing"]
    assert chosen(NAMES, []) == ([], [])


@given(
    pattern=st.lists(st.sampled_from(["*", "?", "a", ".", "[ab]", "[!a]", "^", "+"])).map("".join),
    name=st.text("ab.^+", max_size=6),
)
def test_across_steps_it_is_the_pattern_of_a_shell(pattern, name):
    assert matcher(pattern, across=True)(name) == fnmatchcase(name, pattern)
