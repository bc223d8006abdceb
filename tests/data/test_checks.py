"""Arguments are what they should be, or a ``ValueError`` says which is not, and why."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megablocks_core.data.checks import (
    bounds,
    different_names,
    pairs,
    prefix_of,
    real,
    row,
    several,
    whole_number,
)

NO_NUMBERS = [1.5, 2.0, "3", b"3", None, float("nan"), [3], {}, np.float32(2), torch.tensor(2.5)]


@pytest.mark.parametrize("three", [3, np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)])
def test_a_whole_number_of_any_kind_is_an_int(three):
    assert (whole_number("n", three, 3, 3), type(whole_number("n", three))) == (3, int)
    assert (real("n", three), type(real("n", three))) == (3, int)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_whole_number_is_named(value):
    with pytest.raises(ValueError, match="n=.* must be a whole number"):
        whole_number("n", value)


@pytest.mark.parametrize(
    ("value", "least", "most", "rule"),
    [
        (0, 1, 2**63 - 1, "n=0 must be at least 1"),
        (2**63, 1, 2**63 - 1, "must be between 1 and 2\\*\\*63 - 1"),
        (-1, 0, 2**64 - 1, "n=-1 must be between 0 and 2\\*\\*64 - 1"),
        (300, 0, 255, "n=300 must be between 0 and 255"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_range(value, least, most, rule):
    with pytest.raises(ValueError, match=rule):
        whole_number("n", value, least, most)


def test_rows_of_any_kind_are_int64_and_copies():
    given = np.arange(3)
    for values in (
        [0, 1, 2],
        (0, 1, 2),
        range(3),
        given,
        torch.arange(3),
        np.arange(3, dtype="u1"),
    ):
        found = row("r", values)
        assert (found.dtype, found.tolist()) == (np.int64, [0, 1, 2])
    found[0] = row("r", given)[0] = 7
    assert given[0] == 0
    assert row("r", []).tolist() == []


@pytest.mark.parametrize(
    "values",
    [[1.5], ["3"], [True], [None], [[1]], [[1], [1, 2]], 3, None, "12", {1}, [2**70],
     np.array([2**63], np.uint64), torch.tensor([0.5])],
)  # fmt: skip
def test_what_is_no_row_is_named(values):
    with pytest.raises(ValueError, match="r=.* must be one row of whole numbers"):
        row("r", values)


@pytest.mark.parametrize("values", [[], [1, 3], [0, 3, 2], [0, 2], [0, 1.5, 3]])
def test_bounds_go_from_0_to_the_end(values):
    assert bounds("b", [0, 0, 3], 3).tolist() == [0, 0, 3]
    with pytest.raises(ValueError, match="b=.* must b"):
        bounds("b", values, 3)


@pytest.mark.parametrize("values", [(3, 5), [(3,)], [(3, 5, 7)], "ab", 3, None, {3: 5}])
def test_pairs_are_pairs(values):
    assert pairs("p", [[3, 5]], "pairs") == pairs("p", iter([(3, 5)]), "pairs") == [(3, 5)]
    with pytest.raises(ValueError, match="p=.* must be pairs"):
        pairs("p", values, "pairs")


def test_numbers_are_ints_where_they_can_be():
    assert [real("n", n) for n in (2.0, 0.5, np.float32(0.5), torch.tensor(0.5))] == [
        2,
        0.5,
        0.5,
        0.5,
    ]
    assert type(real("n", 2.0)) is int
    assert real("n", float("inf"), finite=False) == float("inf")


@pytest.mark.parametrize("value", ["1", b"1", None, float("nan"), -1, [1], 10**400])
@pytest.mark.parametrize("finite", [True, False])
def test_what_is_no_number_is_named(value, finite):
    with pytest.raises(ValueError, match="n=.* must be a number, 0 or more"):
        real("n", value, finite=finite)
    with pytest.raises(ValueError, match="and finite"):
        real("n", float("inf"))


@pytest.mark.parametrize("prefix", ["", "folder/", "s3://bucket/", b"a", None, 5, ["a"]])
def test_a_prefix_is_the_path_of_files_without_endings(prefix):
    assert prefix_of(Path("a") / "b") == prefix_of("a/b") == f"{Path.cwd()}/a/b"
    assert prefix_of("s3://bucket/a") == "s3://bucket/a"
    with pytest.raises(ValueError, match="prefix=.* must be a path"):
        prefix_of(prefix)


def test_one_text_is_not_several_and_names_differ():
    assert list(several("t", ["ab"])) == ["ab"]
    for values in ("ab", b"ab", 5, None):
        with pytest.raises(ValueError, match="t=.* must be several"):
            several("t", values)
    assert different_names(("a", "b")) == ["a", "b"]
    for names in (["a", "a"], ["a", 1]):
        with pytest.raises(ValueError, match="names=.* must be texts, no two"):
            different_names(names)
